"""A process of `nxtrain bench scaling`: one rank of one layout, a turn for each line on standard input.

python -m nxtrain.tools.bench.scaling_rank LAYOUT WORKLOAD
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from nxtrain.backends import open_backend
from nxtrain.backends.base import BackendSettings
from nxtrain.tools.bench.scaling import ALONE, LAYOUTS
from nxtrain.tools.bench.train import Workload
from nxtrain.tools.bench.turns import serve
from nxtrain.tools.bench.worker import BREAKDOWN, clocks_of, ours, parts, timed

PATIENCE_S = 600.0


def main(layout: str, work: Workload) -> None:
    """Serve turns until standard input ends."""
    torch.set_num_threads(work.threads)
    serve(lambda: turns(layout, work))


def turns(layout: str, work: Workload) -> dict[str, Callable[[], dict[str, Any]]]:
    """Measurements of this rank, by request: a turn with the seconds of waiting for the other, and the parts."""
    backend = open_backend(work.backend, BackendSettings(hang_timeout_s=PATIENCE_S))
    parallel = {} if layout == ALONE else LAYOUTS[layout]
    step, state = ours(work, backend, parallel=parallel)
    turn = timed(step, work.steps, clocks_of(backend), backend)

    def waiting_too() -> dict[str, Any]:
        backend.collectives.barrier()
        before = backend.diagnostics.waited_s()
        measured = turn()
        return {**measured, "waited": backend.diagnostics.waited_s() - before}

    return {"": waiting_too, BREAKDOWN: parts(step, state, backend)}


if __name__ == "__main__":
    main(sys.argv[1], Workload(**json.loads(sys.argv[2])))
