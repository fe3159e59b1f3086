"""Slow ranks and skipped records are named; the run goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nxtrain.common.errors import StoppedBySignal
from nxtrain.common.run_folder import LOGS_DIR, METRICS_FILE, RANKS_FILE
from nxtrain.train.supervision.stragglers import STEPS as COMPARED
from tests.support.command_ranks import until
from tests.support.commands import OUTPUT, ended, start_rank, trained, write_config
from tests.support.processes import free_port
from tests.support.runs import course

STEPS = 100
LOST_S = 0.05
BEAT_S = 1.0
"""Ranks look at each other that often with this limit, and so are compared over ten steps or those of a beat."""


@pytest.mark.alone
def test_a_slow_rank_is_named_soon_and_changes_nothing(tmp_path: Path) -> None:
    quick, slow = tmp_path / "quick", tmp_path / "slow"
    output = slow / "0" / OUTPUT

    def is_told() -> bool:
        return "rank 1 is slow: " in output.read_text()

    for folder, armed in ((quick, ""), (slow, f"sleep!@1:*:opt:{LOST_S}")):
        write_config(folder, steps=STEPS, every=50)
        port, limit = free_port(), "recovery.hang_timeout_s=60"
        processes = {number: start_rank(folder, number, port, limit, armed=armed) for number in range(2)}
        if armed:
            until(is_told, 60.0, output.read_text)
            assert (slow / "run" / METRICS_FILE).read_text().count("\n") <= COMPARED + 3 * BEAT_S / LOST_S
        said = ended(folder, processes, 60.0)
        assert [process.exitcode for process in processes.values()] == [0, 0], said
    assert said[0].count("is slow: ") == 1, said[0]
    line = said[0][said[0].index("rank 1 is slow: ") :].splitlines()[0]
    assert " ms per step in optimizer, where the median is " in line
    assert float(line.split()[4]) >= 0.8 * 1e3 * LOST_S, "over fewer steps at the beginning, which were not slow"
    assert course(slow / "run") == course(quick / "run")
    rates = json.loads((slow / "run" / LOGS_DIR / RANKS_FILE).read_text(encoding="utf-8"))
    assert set(rates) == {"0", "1"}
    assert rates["1"]["optimizer"] > LOST_S > rates["0"]["optimizer"]
    assert rates["0"]["waiting"] > 0.8 * LOST_S > rates["1"]["waiting"]
    step_s = [sum(rates[rank].values()) for rank in "01"]
    assert step_s[0] == pytest.approx(step_s[1], rel=0.1), "all ranks take equally long, each with its own parts"


OPTIONS = ("recovery.non_finite=skip", "metrics.log_every=4", "checkpoint.every=100")


def test_a_skipped_step_outlives_a_stop(tmp_path: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    write_config(straight, steps=12)
    trained(straight, *OPTIONS, armed="nan@0:5:fwd")
    write_config(stopped, steps=12)
    # The signal is heard of within a step that takes long.
    output = trained(
        stopped, *OPTIONS, armed="nan@0:5:fwd,term@0:6:fwd,sleep@0:6:bwd:0.5", code=StoppedBySignal.exit_code
    )
    assert "stopped after step 6," in output or "stopped after step 7," in output
    trained(stopped, *OPTIONS, armed="nan@0:5:fwd")
    assert course(stopped / "run") == course(straight / "run")
    assert [record.get("skipped_steps") for record in course(stopped / "run")] == [None, None, [5], None]
