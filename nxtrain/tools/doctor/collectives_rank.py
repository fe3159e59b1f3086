"""Rank process of `nxtrain doctor --collectives`: joins the other ranks, and measures all-reduces.

python -m nxtrain.tools.doctor.collectives_rank BACKEND LIMIT_S, with the environment variables of torchrun. Prints one
line of JSON.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import closing
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistError, Store

from nxtrain.backends import choose, open_backend
from nxtrain.backends.base import Backend, BackendSettings
from nxtrain.common.distributed.rendezvous import connect
from nxtrain.common.mesh import Mesh
from nxtrain.common.process.placement import Placement

SIZES_BYTES = (1 << 10, 1 << 20, 1 << 24)
"""Sizes of the all-reduced tensors in bytes: the smallest shows the latency, the largest the bandwidth."""

REPEATS = 10
POLL_S = 0.05


def join(backend: str, limit_s: float) -> dict[str, Any]:
    """Join the other ranks, and measure all-reduces over all ranks.

    Returns:
        `missing`: ranks that did not join. `error`: message, empty without an error. `rows`: bytes and seconds of each
        all-reduce.
    """
    placement = Placement.read()
    host = os.environ["MASTER_ADDR"]
    timeout = timedelta(seconds=limit_s)
    port = int(os.environ["MASTER_PORT"])
    if placement.rank:
        why = _unreachable(host, port, limit_s)
        if why:
            return {"missing": [0], "error": why, "rows": []}
    try:
        store = connect(host, port, placement.rank, timeout)
        missing = _missing(store, placement, limit_s)
        if missing:
            return {"missing": missing, "error": "", "rows": []}
    except DistError as error:
        why = (str(error).strip().splitlines() or ["no answer"])[0]
        return {"missing": [], "error": why, "rows": []}
    with closing(open_backend(choose(backend)[0], BackendSettings(hang_timeout_s=limit_s))) as opened:
        return {"missing": [], "error": "", "rows": _measure(opened, placement), "device": str(opened.device)}


def _unreachable(host: str, port: int, limit_s: float) -> str:
    """Try to connect to an address within a time limit, and return the error; empty if a server answered.

    torch itself would wait without a limit.
    """
    limit, why = time.monotonic() + limit_s, "no answer"
    while time.monotonic() < limit:
        try:
            socket.create_connection((host, port), timeout=max(POLL_S, limit - time.monotonic())).close()
            return ""
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(POLL_S)
    return f"{host}:{port}: {why}"


def _missing(store: Store, placement: Placement, limit_s: float) -> list[int]:
    """Ranks that did not join within the time limit."""
    store.set(f"doctor/{placement.rank}", socket.gethostname())
    limit = time.monotonic() + limit_s
    waiting = list(range(placement.world))
    while time.monotonic() < limit:
        waiting = [rank for rank in waiting if not store.check([f"doctor/{rank}"])]
        if not waiting:
            break
        time.sleep(POLL_S)
    return waiting


def _measure(backend: Backend, placement: Placement) -> list[tuple[int, float]]:
    mesh = Mesh.build(placement.world, placement.rank, dp=placement.world)
    backend.lay_out(mesh)
    rows = []
    for size in SIZES_BYTES:
        x = torch.zeros(size // 4, device=backend.device)
        backend.collectives.all_reduce(x, mesh.dp)
        backend.collectives.barrier()
        began = time.perf_counter()
        for _ in range(REPEATS):
            x = backend.collectives.all_reduce(x, mesh.dp)
        x.sum().item()  # waits for the device
        rows.append((size, (time.perf_counter() - began) / REPEATS))
    return rows


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(join(sys.argv[1], float(sys.argv[2]))), flush=True)
    os._exit(0)  # the store may wait for ranks that never come
