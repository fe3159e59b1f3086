"""A checkpoint that comes slowly from S3 is not a hang, for a rank that reads or waits; one that stops coming is."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.errors import HangError, StoppedBySignal
from nxtrain.common.io import object_store
from tests.support.commands import command, ended, start_rank, trained, write_config
from tests.support.object_stores import BUCKET, s3, s3_variables, slow_s3
from tests.support.processes import free_port
from tests.support.runs import course, saved_steps

__all__ = ["s3", "s3_variables"]

PATIENCE_S, SLOW_S = 3.0, 9.0

MIRROR = f"checkpoint.mirror=s3://{BUCKET}/run"
PATIENCE = f"recovery.hang_timeout_s={PATIENCE_S:g}"


def begin(folder: Path, steps: int, *overrides: str, **environ: str) -> tuple[int, str]:
    return command(
        folder,
        "train",
        folder / "config.toml",
        f"train.steps={steps}",
        "optim.decay_steps=8",
        *overrides,
        environ=environ,
    )


@pytest.fixture
def lost(tmp_path: Path, s3: Any, s3_variables: dict[str, str]) -> Path:
    """The folder of a run whose disk was lost after step 4, and whose mirror has that step."""
    write_config(tmp_path, every=4)
    assert begin(tmp_path, 4, MIRROR, **s3_variables)[0] == 0
    shutil.rmtree(tmp_path / "run")
    return tmp_path


def test_a_restoration_that_takes_three_times_the_limit_goes_on(lost: Path, s3_variables: dict[str, str]) -> None:
    with slow_s3(s3_variables, SLOW_S, 1) as variables:
        began = time.monotonic()
        code, output = begin(lost, 8, MIRROR, PATIENCE, **variables)
    assert code == 0, output
    assert time.monotonic() - began > SLOW_S
    assert "continues after step 4" in output
    straight = lost / "straight"
    write_config(straight)
    assert begin(straight, 8)[0] == 0
    assert course(lost / "run") == course(straight / "run")[4:]


def test_a_rank_that_has_all_waits_for_one_that_still_reads(lost: Path, s3_variables: dict[str, str]) -> None:
    """One slow answer, which one of the two gets; the other has nothing to read meanwhile."""
    output = two_ranks(lost, s3_variables, SLOW_S)
    assert all("did not" not in said for said in output.values()), output
    assert "continues after step 4" in output[0]
    assert [record["step"] for record in course(lost / "run")] == [5, 6, 7, 8]


def two_ranks(folder: Path, variables: dict[str, str], seconds: float) -> dict[int, str]:
    """Output of two ranks that resume from the mirror, with one slow answer for both."""
    port = free_port()
    with slow_s3(variables, seconds, 1) as slow:
        overrides = (MIRROR, PATIENCE, "train.steps=8", "optim.decay_steps=8", "checkpoint.every=0")
        ranks = {number: start_rank(folder, number, port, *overrides, environ=slow) for number in range(2)}
        return ended(folder, ranks, 60.0)


def test_an_answer_that_stops_coming_is_a_hang(lost: Path, s3_variables: dict[str, str]) -> None:
    with slow_s3(s3_variables, 0.0, 1) as variables:
        code, output = begin(lost, 8, MIRROR, PATIENCE, **variables)
    assert code == HangError.exit_code, output
    assert f"did not come within recovery.hang_timeout_s={PATIENCE_S:g} seconds" in output or "(restore)" in output


def _take_nothing() -> None:
    def upload(*args: object) -> None:
        time.sleep(10**6)

    vars(object_store)["FolderStore"].upload = upload


def test_a_mirror_that_hangs_costs_neither_a_checkpoint_nor_a_step(tmp_path: Path) -> None:
    write_config(tmp_path, steps=1000)
    port, mirror = free_port(), f"checkpoint.mirror={tmp_path}/mirror"
    ranks = {
        number: start_rank(
            tmp_path,
            number,
            port,
            mirror,
            "checkpoint.keep=9",
            "checkpoint.async=false",
            "recovery.grace_s=2",
            armed="sleep@*:1:fwd:0.03,term@1:10:fwd",
            first=_take_nothing,
        )
        for number in range(2)
    }
    output = ended(tmp_path, ranks, 40.0)
    assert {process.exitcode for process in ranks.values()} == {StoppedBySignal.exit_code}, output
    last = course(tmp_path / "run")[-1]["step"]
    saved = saved_steps(tmp_path / "run")
    assert saved == [*range(4, last, 4), last]
    assert f"WARNING: the mirror lacks the checkpoint of step {last}: the run ends" in output[0]


def test_a_mirror_hides_no_hang(tmp_path: Path) -> None:
    write_config(tmp_path)
    output = trained(
        tmp_path,
        f"checkpoint.mirror={tmp_path}/mirror",
        PATIENCE,
        armed="hang@0:4:ckpt_stage",
        code=HangError.exit_code,
    )
    assert "(checkpoint)" in output


def _delete_no_step() -> None:
    delete = vars(object_store)["FolderStore"].delete

    def kept(store: object, names: list[str]) -> None:
        if names[0].startswith("step-"):
            raise PermissionError(13, "Permission denied", names[0])
        delete(store, names)

    vars(object_store)["FolderStore"].delete = kept


def test_a_mirror_whose_old_checkpoints_stay_lacks_no_new_one(tmp_path: Path) -> None:
    write_config(tmp_path, every=4)
    overrides = (f"checkpoint.mirror={tmp_path}/mirror", "checkpoint.keep=1", "checkpoint.async=false")
    assert begin(tmp_path, 8, *overrides)[0] == 0
    words = ("train", tmp_path / "config.toml", "train.steps=12", "optim.decay_steps=8", *overrides)
    code, output = command(tmp_path, *words, first=_delete_no_step)
    assert code == 0, output
    assert "lacks" not in output
    flat = " ".join(output.split())
    assert "WARNING: the mirror has the checkpoint of step 12, but older ones stay: cannot delete in" in flat
    assert (tmp_path / "mirror/step-00000012/meta.json").is_file()
