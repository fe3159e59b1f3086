"""A rank that does not get on is named within two seconds of the limit, with the stacks of all ranks."""

from __future__ import annotations

import signal
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from nxtrain.errors import HangError
from tests.support.command_ranks import WORLD, Ranks, until, write_config

PATIENCE_S = 3.0
LATE_S = 2.0
"""Within which all ranks that can have told who hangs."""


def hung(started_by: ForkServerContext, folder: Path, kind: str, survivors: list[int]) -> tuple[Ranks, float]:
    """Ranks of which the second hangs, and the seconds until the survivors had ended."""
    write_config(folder, recovery={"hang_timeout_s": PATIENCE_S})
    with Ranks(started_by, folder, f"{kind}@1:9:data") as ranks:
        codes = ranks.ended(*survivors)
        (fired,) = (folder / "run/faults").iterdir()
        after_s = time.time() - fired.stat().st_mtime
        assert set(codes.values()) == {HangError.exit_code}, ranks.said()
        if kind == "gil":
            assert ranks.ended(1) == {1: HangError.exit_code}, "the system's timer ends it; nothing of Python can"
    return ranks, after_s


@pytest.mark.alone
def test_a_rank_that_sleeps_in_data_is_named_by_all(started_by: ForkServerContext, tmp_path: Path) -> None:
    ranks, after_s = hung(started_by, tmp_path, "hang", [0, 1])
    assert PATIENCE_S - 0.5 < after_s < PATIENCE_S + LATE_S
    verdicts = set()
    for rank, said in ranks.said().items():
        assert said.count("error: ") == 1, said
        error = said[said.index("error: ") :]
        verdicts.add(error.removeprefix(f"error: rank {rank}: "))
        assert "Traceback" not in said
        stacks = (tmp_path / "run" / "logs" / f"hang-rank-{rank}.txt").read_text(encoding="utf-8")
        # Rank 0 waits in a collective, whose own time may come to its end a little sooner.
        places = ["loader.py"] if rank else ["shared_memory.py", "in _yield_to"]
        assert any(place in stacks for place in places), stacks
        assert any(place in said for place in places), "stacks are on standard error too"
    (verdict,) = verdicts
    assert verdict.startswith(
        f"rank 1 did not come within recovery.hang_timeout_s={PATIENCE_S:g} seconds: rank 1 is in"
    )
    assert "(data)" in verdict
    assert "in prefetched" in verdict


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["stop", "gil"])
def test_a_rank_that_cannot_answer_is_named_by_the_other(
    started_by: ForkServerContext, tmp_path: Path, kind: str
) -> None:
    ranks, after_s = hung(started_by, tmp_path, kind, [0])
    assert after_s < PATIENCE_S + LATE_S
    said = ranks.said()[0]
    assert f"error: rank 0: rank 1 did not come within recovery.hang_timeout_s={PATIENCE_S:g} seconds and gives" in said
    assert "rank 1 was last in step" in said
    if kind == "gil":
        assert "in _hold_gil" in ranks.said()[1]


def test_stacks_are_to_be_had_on_request(started_by: ForkServerContext, tmp_path: Path) -> None:
    write_config(tmp_path)
    with Ranks(started_by, tmp_path) as ranks:
        ranks.await_steps(2)
        ranks.send(signal.SIGUSR2, *range(WORLD))
        until(lambda: all("most recent call first" in said for said in ranks.said().values()), 5.0, ranks.said)
        assert all(process.is_alive() for process in ranks.processes)
