"""Environment of a start, as the run folder keeps it: versions, machine, ranks."""

from __future__ import annotations

import json
import os
import platform
import socket
from pathlib import Path

import torch

import nxtrain
from nxtrain.common.io.atomic import replace_text
from nxtrain.common.run_folder import ENVIRONMENT_FILE
from nxtrain.train.context import RunContext


def record_environment(folder: Path, context: RunContext) -> None:
    """Write the environment of this start; an earlier start's is replaced."""
    mesh = context.mesh
    found = {
        "nxtrain": nxtrain.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpus": os.cpu_count(),
        "backend": context.backend.name,
        "asynchronous": context.backend.is_asynchronous,
        "ranks": mesh.world,
        "ranks per node": context.backend.local_world,
        "tp": mesh.tp_size,
        "pp": mesh.pp_size,
        "dp": mesh.dp_size,
    }
    replace_text(folder / ENVIRONMENT_FILE, json.dumps(found, indent=2) + "\n", durable=False)
