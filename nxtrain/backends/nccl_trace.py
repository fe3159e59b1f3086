"""Newest collectives of each NCCL communicator, from torch's flight recorder.

The host enqueues collectives and continues, so in a hang the hosts of all ranks wait at the same line of code. The
recorder knows the collectives that each rank has enqueued, and the ones that its device has completed.

Source: torch 2.9, torch/csrc/distributed/c10d/FlightRecorder.hpp; torch 2.15, hooks/FlightRecorderHook.hpp there.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from nxtrain.common.distributed.heartbeats import Queued

NEWER = "nccl2"
"""Name under which torch 2.15 records its second implementation of NCCL's groups, its default."""


def recorded() -> bytes:
    """Pickled recording of torch's flight recorder, which `nxtrain.launch.gpu` enables; empty if torch has none."""
    from torch._C import _distributed_c10d

    wanted = {"includeCollectives": True, "includeStackTraces": False, "onlyActive": False}
    if hasattr(_distributed_c10d, "ProcessGroupNCCL2"):
        dump_of = getattr(_distributed_c10d, "_dump_fr_trace", None)
        with suppress(TypeError):  # of releases whose function takes no name of a recorder
            recording = b"" if dump_of is None else bytes(dump_of(**wanted, backend=NEWER))
            if _entries(recording):
                return recording
    dump = getattr(_distributed_c10d, "_dump_nccl_trace", None)
    if dump is None:
        return b""
    return bytes(dump(**wanted))


def _entries(recording: bytes) -> Sequence[Mapping[str, Any]]:
    """Collectives of a recording, oldest first."""
    return pickle.loads(recording).get("entries", ()) if recording else ()


def newest(recording: bytes) -> dict[str, Queued]:
    """Return the newest collective and the newest transfer of each communicator, by the communicator's name.

    Args:
        recording: Result of `recorded` in this process; pickles of other origin may execute code.
    """
    queues: dict[str, Queued] = {}
    for entry in _entries(recording):
        name = str(entry["process_group"][0])
        number = int(entry["collective_seq_id"])
        if entry["is_p2p"]:
            name, number = f"{name} transfers", int(entry["p2p_seq_id"])
        done = queues[name].done if name in queues else 0
        if entry["state"] == "completed":
            done = max(done, number)
        operation = str(entry["profiling_name"]).partition(":")[2]
        queues[name] = Queued(operation, number, done)
    return queues
