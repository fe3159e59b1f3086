"""Newest collectives of each NCCL communicator, from torch's flight recorder.

The host enqueues collectives and continues, so in a hang the hosts of all ranks wait at the same line of code. The
recorder knows the collectives that each rank has enqueued, and the ones that its device has completed.

Source: torch 2.9, torch/csrc/distributed/c10d/FlightRecorder.hpp.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

from nxtrain.common.distributed.heartbeats import Queued


def recorded() -> bytes:
    """Pickled recording of torch's flight recorder, which `nxtrain.launch.gpu` enables; empty if torch has none."""
    from torch._C import _distributed_c10d

    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    if dump is None:
        return b""
    return bytes(dump(includeCollectives=True, includeStackTraces=False, onlyActive=False))


def newest(recording: bytes) -> dict[str, Queued]:
    """Return the newest collective and the newest transfer of each communicator, by the communicator's name.

    Args:
        recording: Result of `recorded` in this process; pickles of other origin may execute code.
    """
    entries: Iterable[Mapping[str, Any]] = pickle.loads(recording).get("entries", ()) if recording else ()
    queues: dict[str, Queued] = {}
    for entry in entries:  # oldest first
        name = str(entry["process_group"][0])
        number = int(entry["collective_seq_id"])
        if entry["is_p2p"]:
            name, number = f"{name} transfers", int(entry["p2p_seq_id"])
        done = queues[name].done if name in queues else 0
        if entry["state"] == "completed":
            done = max(done, number)
        operation = str(entry["profiling_name"]).removeprefix("nccl:")
        queues[name] = Queued(operation, number, done)
    return queues
