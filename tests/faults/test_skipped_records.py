"""A skipped step stands in the record of a run that stopped before that was due as in that of one that did not."""

from __future__ import annotations

from pathlib import Path

from nxtrain.common.errors import StoppedBySignal
from tests.support.commands import train, write_config
from tests.support.runs import course

OPTIONS = ("recovery.non_finite=skip", "metrics.log_every=4", "checkpoint.every=100")


def test_a_skipped_step_outlives_a_stop(tmp_path: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    write_config(straight, steps=12)
    code, output = train(straight, *OPTIONS, armed="nan@0:5:fwd")
    assert code == 0, output
    write_config(stopped, steps=12)
    # The signal is heard of within a step that takes long.
    code, output = train(stopped, *OPTIONS, armed="nan@0:5:fwd,term@0:6:fwd,sleep@0:6:bwd:0.5")
    assert code == StoppedBySignal.exit_code, output
    assert "stopped after step 6," in output or "stopped after step 7," in output
    code, output = train(stopped, *OPTIONS, armed="nan@0:5:fwd")
    assert code == 0, output
    assert course(stopped / "run") == course(straight / "run")
    assert [record.get("skipped_steps") for record in course(stopped / "run")] == [None, None, [5], None]
