"""A rank that does not get on is named within two seconds of the limit, with the stacks of all ranks.

One that is only slow is named while the run goes on.
"""

from __future__ import annotations

import signal
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from nxtrain.errors import HangError
from tests.support.command_ranks import WORLD, Fault, Ranks, context, until, write_config

PATIENCE_S = 3.0
LATE_S = 2.0
"""Within which all ranks that can have told who hangs."""


@pytest.fixture(scope="module")
def started_by() -> ForkServerContext:
    return context()


def hung(started_by: ForkServerContext, folder: Path, kind: str, survivors: list[int]) -> tuple[Ranks, float]:
    """Ranks of which the second hangs, and the seconds until the survivors had ended."""
    write_config(folder, patience_s=PATIENCE_S)
    with Ranks(started_by, folder, Fault(kind, step=8, rank=1)) as ranks:
        codes = ranks.ended(*survivors)
        struck = float((folder / "struck").read_text(encoding="utf-8"))
        after_s = time.monotonic() - struck
        assert set(codes.values()) == {HangError.exit_code}, ranks.said()
    return ranks, after_s


@pytest.mark.alone
def test_a_rank_that_sleeps_in_data_is_named_by_all(started_by: ForkServerContext, tmp_path: Path) -> None:
    ranks, after_s = hung(started_by, tmp_path, "sleep", [0, 1])
    assert PATIENCE_S - 0.5 < after_s < PATIENCE_S + LATE_S
    verdicts = set()
    for rank, said in ranks.said().items():
        assert said.count("error: ") == 1, said
        error = said[said.index("error: ") :]
        verdicts.add(error.removeprefix(f"error: rank {rank}: "))
        assert "Traceback" not in said
        stacks = (tmp_path / "run" / "logs" / f"hang-rank-{rank}.txt").read_text(encoding="utf-8")
        # Rank 0 waits in a collective, whose own time may come to its end a little sooner.
        places = ["loader.py"] if rank else ["c10d_collectives.py", "in _yield_to"]
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


def test_a_rank_that_holds_the_lock_ends_with_its_stack(started_by: ForkServerContext, tmp_path: Path) -> None:
    """The system's timer ends it; nothing of Python can."""
    write_config(tmp_path, patience_s=1.5)
    with Ranks(started_by, tmp_path, Fault("gil", step=8, rank=1)) as ranks:
        assert ranks.ended() == {0: HangError.exit_code, 1: HangError.exit_code}
        assert "in strike" in ranks.said()[1]


@pytest.mark.alone
def test_a_slow_rank_is_named_once_and_the_run_goes_on(started_by: ForkServerContext, tmp_path: Path) -> None:
    write_config(tmp_path, patience_s=60)
    with Ranks(started_by, tmp_path, Fault("slow", step=3, rank=1, seconds=0.2)) as ranks:
        until(lambda: "rank 1 is slow: " in ranks.said()[0], 20.0, ranks.said)
        ranks.await_steps(ranks.folder.joinpath("run/metrics.jsonl").read_text().count("\n") + 30)
        said = ranks.said()[0]
        assert said.count("rank 1 is slow: ") == 1, said
        line = said[said.index("rank 1 is slow") :].splitlines()[0]
        assert " ms per step in data, where the median is " in line
        assert float(line.split()[4]) > 100, "200 ms, less what was read ahead, and over fewer steps at the beginning"
        assert all(process.is_alive() for process in ranks.processes)


def test_stacks_are_to_be_had_on_request(started_by: ForkServerContext, tmp_path: Path) -> None:
    write_config(tmp_path)
    with Ranks(started_by, tmp_path) as ranks:
        ranks.await_steps(2)
        ranks.send(signal.SIGUSR2, *range(WORLD))
        until(lambda: all("most recent call first" in said for said in ranks.said().values()), 5.0, ranks.said)
        assert all(process.is_alive() for process in ranks.processes)
