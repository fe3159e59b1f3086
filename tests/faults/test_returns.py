"""A run that is told to go back does so however it is cut off, and goes on from there however often it is started.

Each is a whole run of one rank; the reference is the same run that nothing befell.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from nxtrain.common.errors import CheckpointError
from tests.support.commands import command, write_config
from tests.support.runs import course, saved_steps

RESTARTED = {"TORCHELASTIC_RESTART_COUNT": "1"}


def train(folder: Path, *overrides: str, restarted: bool = False, armed: str = "") -> tuple[int, str]:
    """`nxtrain train`, perhaps as an agent starts it again."""
    environ = {**(RESTARTED if restarted else {}), **({"NXTRAIN_FAULTS": armed} if armed else {})}
    return command(folder, "train", folder / "config.toml", *overrides, environ=environ)


def steps(folder: Path) -> list[int]:
    return saved_steps(folder / "run")


def test_killed_while_it_goes_back_a_run_goes_back_at_the_next_start(
    tmp_path: Path, straight: list[dict[str, Any]]
) -> None:
    write_config(tmp_path, steps=12)
    assert train(tmp_path, "checkpoint.async=false")[0] == 0
    output = (f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000004", "checkpoint.async=false")
    code, said = train(tmp_path, *output, armed="kill@0:0:load")
    assert (code, steps(tmp_path)) == (-signal.SIGKILL, [4, 8, 12]), said
    code, said = train(tmp_path, *output, restarted=True, armed="kill@0:10:fwd")
    assert code == -signal.SIGKILL, said
    assert "continues after step 4\n" in said
    assert "put aside as abandoned, since no part of it any more: step-00000008, step-00000012\n" in said
    assert steps(tmp_path) == [4, 8]
    code, said = train(tmp_path, *output, restarted=True)
    assert code == 0, said
    assert "continues after step 8\n" in said
    assert course(tmp_path / "run") == straight


def test_a_second_run_of_the_same_mirror_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    mirror = f"checkpoint.mirror={tmp_path}/mirror"
    for name in ("first", "second"):
        write_config(tmp_path / name, steps=4)
    assert train(tmp_path / "first", mirror)[0] == 0
    code, said = train(tmp_path / "second", mirror)
    assert code == CheckpointError.exit_code, said
    assert f"checkpoint.mirror={tmp_path}/mirror belongs to another run" in said
    assert f"run.dir={tmp_path}/first/run to continue that run" in said
    assert "Traceback" not in said
    code, said = train(
        tmp_path / "second",
        mirror,
        f"checkpoint.resume={tmp_path}/mirror",
        "checkpoint.allow_drift=['data']",
        "train.steps=5",
    )
    assert code == 0, said
    assert "continues after step 4\n" in said
