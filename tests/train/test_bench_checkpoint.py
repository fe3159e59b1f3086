"""`nxtrain bench checkpoint` writes and reads a real state, and its shares follow from the speeds of a round."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nxtrain.tools.bench import checkpoint
from nxtrain.tools.bench.checkpoint import COPY, DISK_READ, DISK_WRITE, FLOORS, LOAD, SAVE, STALL, FilledState
from tests.support.commands import outcome


def test_a_checkpoint_is_measured_beside_the_disk_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[int] = []
    save = FilledState.save

    def saved(state: FilledState) -> None:
        save(state)
        files = (file for file in tmp_path.rglob("step-*/**/*") if file.is_file())
        written.append(sum(file.stat().st_size for file in files))

    monkeypatch.setattr(FilledState, "save", saved)
    code, out, err = outcome("bench", "checkpoint", "--mib", 31, "--folder", tmp_path, "--rounds", 1, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["mib"] == 24, "two tensors of each kind"
    assert [size >> 20 for size in written] == [24, 24]
    results = found["results"]
    assert set(results) == {COPY, STALL, DISK_WRITE, DISK_READ, *FLOORS}
    for name, row in results.items():
        floor = results[FLOORS.get(name, name)]["gib_per_s"]
        assert row["share"] == pytest.approx(row["gib_per_s"] / floor)
        assert row["gib_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("slow", "code"), [(SAVE, 1), (LOAD, 1), ("", 0)])
def test_the_check_fails_below_a_target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow: str, code: int) -> None:
    names = {COPY, STALL, DISK_WRITE, DISK_READ, *FLOORS}
    seconds = {name: [2.0 if name == slow else 1.0] for name in names}
    monkeypatch.setattr(checkpoint, "measure", lambda *_: seconds)
    ended, out, err = outcome("bench", "checkpoint", "--folder", tmp_path, "--check", "--json")
    assert ended == code, err
    assert list(json.loads(out)["missed"]) == ([slow] if slow else [])
