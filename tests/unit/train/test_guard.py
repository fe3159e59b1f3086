"""Decisions of the guard where disks are full, or where each node has its own; the device's answers are made up."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from nxtrain.checkpoint import directory
from nxtrain.common.batch_sizes import BatchSizes
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.errors import CheckpointError, DivergedError, RestartError
from nxtrain.common.io.jsonl import JsonlLog
from nxtrain.common.run_folder import CHECKPOINTS_DIR, LOGS_DIR
from nxtrain.config.schema import RunConfig, TrainConfig
from nxtrain.data.loader import RowPositions
from nxtrain.train.health.numerics import MAX_BAD_STEPS, NON_FINITE, NumericsGuard
from nxtrain.train.health.step_history import PastStep
from nxtrain.train.step import TrainState

BAD, GOOD = {"loss": float("nan"), "grad_norm": 1.0}, {"loss": 1.0, "grad_norm": 1.0}


def guard(
    folder: Path,
    policy: str,
    *,
    rank: int = 0,
    screen: io.StringIO | None = None,
    norms: Sequence[float] = (),
    mirror: str = "",
    rows: RowPositions | None = None,
) -> NumericsGuard:
    """One that sees nothing but bad steps, unless a loss is finite; `norms` are those of the steps from 1."""

    def take(step: int, last: int, read: dict[str, float]) -> list[PastStep]:
        values = GOOD if math.isfinite(read["loss"]) else BAD
        steps = range(last + 1, step + 1)
        return [PastStep(item, **{**values, **({"grad_norm": norms[item - 1]} if norms else {})}) for item in steps]

    config = SimpleNamespace(
        recovery=SimpleNamespace(non_finite=policy, vote_every=0, on_divergence="warn"),
        run=SimpleNamespace(dir=folder),
        metrics=SimpleNamespace(spike_threshold=0.1),
        train=TrainConfig(global_batch=4),
        checkpoint=SimpleNamespace(mirror=mirror),
    )
    collectives = SimpleNamespace(barrier=lambda: None)
    state = SimpleNamespace(
        mesh=SimpleNamespace(rank=rank, world=1),
        backend=SimpleNamespace(host_group=None, collectives=collectives),
        history=SimpleNamespace(take=take),
    )
    console = Console(file=screen or io.StringIO(), soft_wrap=True)
    return NumericsGuard(cast("RunConfig", config), cast("TrainState", state), console=console, rows=rows)


def write(folder: Path, verdicts: dict[int, str]) -> None:
    (folder / LOGS_DIR).mkdir()
    lines = [json.dumps({"step": step, "verdict": verdict}) + "\n" for step, verdict in verdicts.items()]
    (folder / LOGS_DIR / NON_FINITE).write_text("".join(lines), encoding="utf-8")


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_what_was_decided_is_written_once_the_disk_takes_it(tmp_path: Path, policy: str) -> None:
    """A step that was skipped, or that was bad again after a rollback."""
    screen = io.StringIO()
    if policy == "rollback":
        write(tmp_path, {7: "rolled_back"})
    watch = guard(tmp_path, policy, screen=screen)
    watch.begin(6, {})
    file = tmp_path / LOGS_DIR / NON_FINITE
    text = file.read_text() if file.exists() else ""
    shutil.rmtree(file.parent, ignore_errors=True)
    file.parent.write_text("no folder", encoding="utf-8")
    assert watch.judge(7, dict(BAD), recorded=False).skipped_steps == (7,)
    assert 'cannot be written: File exists; until it is, it lacks {"step": 7' in screen.getvalue()
    file.parent.unlink()
    file.parent.mkdir()
    file.write_text(text + '{"step": 6, "torn', encoding="utf-8")
    watch.judge(8, dict(GOOD), recorded=False)
    assert "is written again, and lacks nothing" in screen.getvalue()
    expected = {"skip": ["skipped"], "rollback": ["rolled_back", "persistent"]}[policy]
    assert [line["verdict"] for line in JsonlLog(file).read()] == expected


@pytest.mark.parametrize(
    ("steps", "mirror", "is_possible"),
    [((), "", False), ((7, 9), "", False), ((3,), "", True), ((9, 6), "", True), ((), "s3://bucket/run", True)],
)
@pytest.mark.parametrize("bad", [BAD, {**GOOD, "param_norm": math.inf}], ids=["step", "weights"])
def test_a_resume_is_advised_only_where_a_checkpoint_may_be_from_before(
    tmp_path: Path, steps: tuple[int, ...], mirror: str, is_possible: bool, bad: dict[str, float]
) -> None:
    for step in steps:
        folder = directory.step_path(tmp_path / CHECKPOINTS_DIR, step)
        folder.mkdir(parents=True)
        (folder / directory.META).touch()
    watch = guard(tmp_path, "stop", mirror=mirror)
    watch.begin(6, {})
    with pytest.raises(DivergedError) as ended:
        watch.judge(7, dict(bad))
    assert ("Resume from a checkpoint before it with a lower" in str(ended.value)) is is_possible
    assert ("No checkpoint is from before it: start again with a lower" in str(ended.value)) is not is_possible


def test_a_rollback_that_nobody_after_it_would_know_of_ends_the_run(tmp_path: Path) -> None:
    watch = guard(tmp_path, "rollback")
    watch.begin(6, {})
    (tmp_path / LOGS_DIR).write_text("no folder", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"rollback is not possible.* cannot be written: File exists\. Make"):
        watch.judge(7, dict(BAD), recorded=False)


def test_a_bad_step_is_recorded_with_the_rows_that_it_read(tmp_path: Path) -> None:
    """A rollback to step 2 has left out three batches, and an earlier part of the run had other batches."""
    watch = guard(tmp_path, "skip", rows=RowPositions(BatchSizes(4), skips=((2, 3),), origin=100))
    watch.begin(1, {})
    watch.judge(2, dict(BAD))
    watch.judge(3, dict(BAD))
    lines = JsonlLog(tmp_path / LOGS_DIR / NON_FINITE).read()
    assert [line["positions"] for line in lines] == [[104, 108], [120, 124]]


def test_a_rank_knows_what_the_leader_wrote_though_its_own_disk_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollbacks: list[dict[str, Any]] = [{"step": 7, "verdict": "persistent"}]
    monkeypatch.setattr(Ranks, "on_leader", lambda self, action, failure: rollbacks)
    watch = guard(tmp_path, "rollback", rank=1)
    watch.begin(6, {})
    assert watch.judge(7, dict(BAD), recorded=False).skipped_steps == (7,)


def test_bad_steps_in_a_row_count_over_starts(tmp_path: Path) -> None:
    finished = 60
    write(tmp_path, dict.fromkeys(range(finished - MAX_BAD_STEPS + 2, finished + 1), "persistent"))
    watch = guard(tmp_path, "rollback")
    watch.begin(finished, {})
    with pytest.raises(DivergedError, match=f"the {MAX_BAD_STEPS}th in a row"):
        watch.judge(finished + 1, dict(BAD), recorded=False)


def test_bad_steps_before_a_good_one_do_not_count(tmp_path: Path) -> None:
    finished = 60
    write(tmp_path, dict.fromkeys(range(1, finished), "persistent"))
    watch = guard(tmp_path, "rollback")
    watch.begin(finished, {})
    with pytest.raises(RestartError):
        watch.judge(finished + 1, dict(BAD), recorded=False)


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
@pytest.mark.parametrize("verdict", ["", "rolled_back", "persistent"])
def test_weights_that_are_not_finite_end_the_run(tmp_path: Path, policy: str, verdict: str) -> None:
    """A rollback may mend them, but only once."""
    write(tmp_path, {7: verdict} if verdict else {})
    watch = guard(tmp_path, policy)
    watch.begin(6, {})
    error = RestartError if (policy, verdict) == ("rollback", "") else DivergedError
    with pytest.raises(error):
        watch.judge(7, {**BAD, "param_norm": math.nan}, recorded=False)
    verdict = "rolled_back" if error is RestartError else "stopped"
    assert JsonlLog(tmp_path / LOGS_DIR / NON_FINITE).read()[-1]["verdict"] == verdict


@pytest.mark.parametrize("key", ["z_loss", "aux_loss", "noise_scale", "reward_chosen"])
def test_other_numbers_of_a_bad_step_are_no_sign_of_bad_weights(tmp_path: Path, key: str) -> None:
    watch = guard(tmp_path, "skip")
    watch.begin(6, {})
    assert watch.judge(7, {**BAD, "param_norm": 2.0, key: math.nan}).skipped_steps == (7,)
    with pytest.raises(DivergedError, match=f"{key}=nan; the run has diverged, and its weights are not finite"):
        watch.judge(8, {**GOOD, "param_norm": 2.0, key: math.nan})


@pytest.mark.parametrize("spoilt", [b"\xff\n", b"[1]\n", b"3\n", b"{}\n", b'{"step": 6, "ver'])
def test_a_file_of_verdicts_that_is_spoilt_tells_the_rest(tmp_path: Path, spoilt: bytes) -> None:
    write(tmp_path, {7: "persistent"})
    with (tmp_path / LOGS_DIR / NON_FINITE).open("ab") as file:
        file.write(spoilt)
    watch = guard(tmp_path, "rollback")
    watch.begin(6, {})
    assert watch.judge(7, dict(BAD), recorded=False).skipped_steps == (7,)
    with pytest.raises(RestartError):
        watch.judge(8, dict(BAD), recorded=False)
    assert [line["verdict"] for line in JsonlLog(tmp_path / LOGS_DIR / NON_FINITE).read() if line] == [
        "persistent",
        "rolled_back",
    ]


def course(folder: Path, norms: list[float], reads: list[tuple[int, bool]]) -> tuple[list[tuple[int, int]], list[str]]:
    """Spikes of the records, and warnings; after each read that is not recorded the run stops, and another resumes."""
    screen, spikes, kept, last = io.StringIO(), list[tuple[int, int]](), dict[str, Any](), 0
    watch = guard(folder, "skip", screen=screen, norms=norms)
    for step, recorded in reads:
        verdict = watch.judge(step, {"loss": 1.0, "grad_norm": norms[step - 1]}, recorded=recorded)
        spikes += verdict.spikes
        if not recorded:
            kept, last = json.loads(json.dumps(watch.kept(), allow_nan=False)), step
            watch = guard(folder, "skip", screen=screen, norms=norms)
            watch.begin(last, kept)
    return spikes, [line for line in screen.getvalue().splitlines() if "spike" in line or "diverging" in line]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    norms=st.lists(
        st.one_of(st.floats(0.5, 0.55), st.floats(0.5, 0.55), st.floats(0.5, 40.0)), min_size=2, max_size=90
    ),
    cuts=st.dictionaries(st.integers(1, 89), st.booleans(), max_size=8),
)
def test_spikes_and_alarms_cover_every_step_whenever_the_numbers_are_read(
    tmp_path: Path, norms: list[float], cuts: dict[int, bool]
) -> None:
    reads = [(step, recorded) for step, recorded in sorted(cuts.items()) if step < len(norms)]
    every = [(step, True) for step in range(1, len(norms) + 1)]
    assert course(tmp_path, norms, [*reads, (len(norms), True)]) == course(tmp_path, norms, every)


def test_a_record_names_the_alarms_between_two_records(tmp_path: Path) -> None:
    norms = [1.0] * 30 + [50.0] + [1.0] * 3
    watch = guard(tmp_path, "skip", norms=norms)
    verdict = watch.judge(len(norms), {"loss": 1.0, "grad_norm": 1.0})
    assert verdict.alarm == "spike at step 31: grad_norm 50 is 50 times the median of 30 steps before it"
    assert verdict.spikes == ((31, 1),)
    assert watch.judge(len(norms), {"loss": 1.0, "grad_norm": 1.0}).alarm == ""


def test_every_alarm_is_a_line_also_the_third_of_a_kind(tmp_path: Path) -> None:
    """The detector alone decides how often the same is said; a line that is left out may be the one that counts."""
    norms = [1.0] * 20
    for height in (50.0, 60.0, 70.0, 80.0):
        norms += [height, *[1.0] * 10]
    every = [(step, True) for step in range(1, len(norms) + 1)]
    _, lines = course(tmp_path, norms, every)
    assert [line.partition("grad_norm ")[2].partition(" ")[0] for line in lines if "spike" in line] == [
        "50",
        "60",
        "70",
        "80",
    ]
