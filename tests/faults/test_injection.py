"""Faults on purpose do what they say, where they say it, once."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.testing import fault_kinds
from nxtrain.common.testing.fault_points import POINTS
from tests.support.commands import train, trained, write_config


def config(folder: Path) -> None:
    write_config(folder, steps=4, every=2)


def record_points(file: Path) -> None:
    """Write the points that are reached to a file, in place of failing there."""

    def reached(kind: str, arguments: Sequence[str], args: Sequence[Any]) -> None:
        with file.open("a", encoding="utf-8") as out:
            out.write(f"{arguments[0]}\n")

    fault_kinds.act = reached
    fault_kinds.KINDS["oom"] = fault_kinds.Kind(pattern=".*")


def losses(folder: Path) -> list[float]:
    lines = (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def in_fork(action: Callable[[], object], wait_s: float = 5.0) -> int | str:
    """The exit code of a process that does this; `stopped`, or `alive` if it is still there after a while."""
    if not (child := os.fork()):
        try:
            faulthandler.disable()
            action()
        except MemoryError:
            os._exit(81)
        except fault_kinds.InjectedError:
            os._exit(82)
        finally:
            os._exit(99)
    limit = time.monotonic() + wait_s
    while time.monotonic() < limit:
        pid, status = os.waitpid(child, os.WNOHANG | os.WUNTRACED)
        if pid and not os.WIFSTOPPED(status):
            return os.waitstatus_to_exitcode(status)
        if pid:
            break
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "stopped" if pid else "alive"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("kill", -signal.SIGKILL),
        ("stop", "stopped"),
        ("segv", -signal.SIGSEGV),
        ("exit", 1),
        ("raise", 82),
        ("oom", 81),
        ("term", -signal.SIGTERM),
        ("usr1", -signal.SIGUSR1),
    ],
)
def test_a_kind_ends_the_process_in_its_way(kind: str, expected: int | str) -> None:
    assert in_fork(lambda: fault_kinds.act(kind, (), ())) == expected


def test_an_interrupt_reaches_python() -> None:
    def interrupted() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what runs behind them ignore it
        try:
            fault_kinds.act("int", (), ())
            time.sleep(5)
        except KeyboardInterrupt:
            os._exit(83)

    assert in_fork(interrupted) == 83


@pytest.mark.parametrize(("kind", "others_run"), [("hang", True), ("gil", False)])
def test_a_hang_leaves_other_threads_alone_unless_it_holds_the_interpreter(kind: str, others_run: bool) -> None:
    def hung() -> None:
        import threading

        threading.Timer(0.2, os._exit, (84,)).start()
        fault_kinds.act(kind, (), ())

    assert in_fork(hung, wait_s=1.0) == (84 if others_run else "alive")


def test_a_sleep_lasts_as_long_as_told() -> None:
    begin = time.monotonic()
    fault_kinds.act("sleep", ("0.05",), ())
    assert time.monotonic() - begin >= 0.05


def test_an_error_of_the_disk_has_the_number_that_is_told() -> None:
    with pytest.raises(OSError, match="No space left") as full:
        fault_kinds.act("oserror", (), ())
    with pytest.raises(OSError, match="Read-only") as read_only:
        fault_kinds.act("oserror", ("EROFS",), ())
    assert [full.value.errno, read_only.value.errno] == [28, 30]


def test_every_point_is_reached_at_its_step_and_the_run_stays_what_it_was(tmp_path: Path) -> None:
    quiet, watched = tmp_path / "quiet", tmp_path / "watched"
    for folder in (quiet, watched):
        config(folder)
    points = [point for point in POINTS if point not in {"worker", "eval"}]  # data of this source has none of either
    armed = ",".join(f"oom@0:{0 if p == 'load' else 4}:{p}:{p}" for p in points)
    assert train(quiet)[0] == 0
    assert train(watched, "train.steps=2", "optim.decay_steps=4")[0] == 0
    output = trained(watched, armed=armed, first=partial(record_points, tmp_path / "seen"))
    assert "will be broken on purpose" in output
    seen = (tmp_path / "seen").read_text(encoding="utf-8").split()
    assert seen[0] == "load"
    assert seen.index("data") < seen.index("pre_step")  # in its thread, while the step before is under way
    step = ["pre_step", "fwd", "bwd", "reduce", "opt", "post_step", "log"]
    save = ["ckpt_stage", "ckpt_fsync", "ckpt_write", "ckpt_commit", "ckpt_rename", "ckpt_latest"]
    assert [point for point in seen if point not in {"load", "data"}] == step + save
    assert losses(watched) == losses(quiet)
    assert len(list((watched / "run/faults").iterdir())) == len(points)


def test_a_process_killed_in_the_midst_of_a_checkpoint_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    config(tmp_path)
    straight = tmp_path / "straight"
    config(straight)
    assert train(straight)[0] == 0
    armed = "kill@0:4:ckpt_write:4096"
    code, output = train(tmp_path, armed=armed)
    assert code == -signal.SIGKILL, output
    assert f"fault {armed} fires in step 4" in output
    (torn,) = (tmp_path / "run/checkpoints").glob("step-00000004.tmp-*/rank-00000.safetensors")
    assert torn.stat().st_size == 4096
    trained(tmp_path, armed=armed)
    assert losses(tmp_path) == losses(straight)


def test_a_malformed_variable_ends_the_command_with_the_rule(tmp_path: Path) -> None:
    config(tmp_path)
    output = trained(tmp_path, armed="kill@0:4", code=2)
    assert "kind@rank:step:point" in output
    assert "Traceback" not in output


def test_what_repeats_fires_at_every_start(tmp_path: Path) -> None:
    config(tmp_path)
    for _ in range(2):
        output = trained(tmp_path, armed="raise!@0:3:fwd", code=1)
        assert "InjectedError: injected failure" in output
