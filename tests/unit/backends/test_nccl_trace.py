"""Newest collectives of communicators, from a recording as torch's flight recorder makes it."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict
from typing import Any

import pytest
from torch._C import _distributed_c10d

from nxtrain.backends import nccl_trace
from nxtrain.common.distributed.heartbeats import Beat, Queued


def entry(group: str, number: int, name: str, state: str = "completed", transfer: int = 0) -> dict[str, Any]:
    return {
        "process_group": (group, "undefined"),
        "collective_seq_id": number,
        "p2p_seq_id": transfer,
        "is_p2p": bool(transfer),
        "profiling_name": f"nccl:{name}",
        "state": state,
    }


def test_the_newest_of_each_communicator_is_read_with_what_the_device_has_done() -> None:
    entries = [
        entry("1", 1, "all_reduce"),
        entry("2", 1, "all_gather"),
        entry("1", 2, "all_reduce"),
        entry("3", 0, "send 0->1", "scheduled", transfer=4),
        entry("1", 3, "reduce_scatter", "started"),
        entry("1", 4, "all_gather", "scheduled"),
    ]
    result = nccl_trace.newest(pickle.dumps({"version": "2.10", "entries": entries}))
    assert result == {
        "1": Queued("all_gather", 4, 2),
        "2": Queued("all_gather", 1, 1),
        "3 transfers": Queued("send 0->1", 4, 0),
    }
    assert nccl_trace.newest(b"") == nccl_trace.newest(pickle.dumps({"version": "2.10"})) == {}


@pytest.mark.parametrize("has_newer", [False, True])
@pytest.mark.parametrize("uses_newer", [False, True])
def test_the_recorder_of_the_groups_in_use_is_read(
    has_newer: bool, uses_newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.15 has two implementations of NCCL's groups, and `TORCH_DIST_USE_NCCL2=0` selects the older one."""
    used = "nccl2" if has_newer and uses_newer else "nccl"

    def dump(backend: str = "nccl", **wanted: bool) -> bytes:
        assert wanted == {"includeCollectives": True, "includeStackTraces": False, "onlyActive": False}
        made = {**entry("1", 7, ""), "profiling_name": f"{used}:all_gather"}
        return pickle.dumps({"entries": [made] if backend == used else []})

    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace", dump, raising=False)
    monkeypatch.setattr(_distributed_c10d, "_dump_fr_trace", dump, raising=False)
    monkeypatch.delattr(_distributed_c10d, "ProcessGroupNCCL2", raising=False)
    if has_newer:
        monkeypatch.setattr(_distributed_c10d, "ProcessGroupNCCL2", object, raising=False)
    assert nccl_trace.newest(nccl_trace.recorded()) == {"1": Queued("all_gather", 7, 7)}


def test_an_answer_with_collectives_comes_back_from_its_text() -> None:
    beat = Beat(3, "training", 1.0, waits=True, queued={"1": Queued("all_reduce", 3, 2)})
    assert Beat.read(json.dumps(asdict(beat))) == beat
