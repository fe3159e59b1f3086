"""Shares of a run's time, over starts that end in every way, on clocks that the test moves."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from nxtrain.common.process import clock
from nxtrain.common.process.clock import Instant, process_began
from nxtrain.common.run_folder import START_FILE, STARTS_FILE
from nxtrain.metrics.goodput import EXACT_POINTS, MOST_POINTS, Goodput, account
from nxtrain.metrics.goodput_meter import GoodputMeter
from nxtrain.metrics.run_observer import Outcome
from nxtrain.metrics.start_log import read


@dataclass
class Machine:
    """A clock of the boot and one of the wall."""

    boot: str = "first"
    up: float = 500.0
    wall: float = 1.7e9

    def __call__(self) -> Instant:
        return Instant(self.boot, self.up, self.wall)

    def wait(self, seconds: float) -> None:
        self.up += seconds
        self.wall += seconds


@dataclass
class Run:
    """A run of steps of 1 s, which evaluates for 2 s and saves for 0.5 s after every fourth."""

    logs: Path
    machine: Machine = field(default_factory=Machine)
    said: list[str] = field(default_factory=list)

    def start(self, resumed: int, last: int, outcome: str, *, load_s: float = 10.0, tail_s: float = 0.25) -> float:
        """One start; `tail_s` from its last progress to its end. The goodput of its last record."""
        machine, recorded_goodput = self.machine, 0.0
        meter = GoodputMeter(self.logs, self.said.append, machine(), machine)
        machine.wait(load_s)
        meter.begin(resumed)
        meter.finish(resumed)
        for step in range(resumed + 1, last + 1):
            meter.enter(step, "training")
            machine.wait(1.0)
            if step % 4 == 0:
                meter.enter(step, "evaluation")
                machine.wait(2.0)
                recorded_goodput = meter.measure(step)["goodput"]
                meter.enter(step, "checkpoint")
                machine.wait(0.5)
                meter.saved(0.5, 3.0)
            meter.finish(step)
        machine.wait(tail_s)
        meter._next_beat = 0.0
        meter.beat()
        if outcome != "killed":
            meter.end(cast("Outcome", outcome))
        return recorded_goodput

    def parts(self) -> Goodput:
        return account(read(self.logs))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "logs")


def total(parts: Goodput) -> float:
    return math.fsum(value for key, value in asdict(parts).items() if key.endswith("_s") and key != "wall_s")


@pytest.mark.parametrize("outcome", ["failed", "killed"])
def test_parts_of_a_run_that_failed_once(run: Run, outcome: str) -> None:
    """Ten steps, two of them lost with what they took; detected after 0.25 s, and started again after 5 s more."""
    began = run.machine()
    run.start(0, 10, outcome)
    run.machine.wait(5.0)
    recorded_goodput = run.start(8, 12, "done", tail_s=0.125)
    result = run.parts()
    assert result == Goodput(
        starts=2,
        wall_s=run.machine().since(began),
        productive_s=7.0 + 3.0,  # steps 2 to 8, and 10 to 12
        start_s=10.0 + 1.0,
        lost_steps=2,
        lost_s=2.0,
        detect_s=0.25,
        restart_s=5.0 + 10.0 + 1.0,
        checkpoint_stall_s=3 * 0.5,
        eval_s=3 * 2.0,
        other_s=0.125,
    )
    assert total(result) == result.wall_s
    assert result.record() == {
        "lost_steps": 2,
        "lost_s": 2.0,
        "detect_s": 0.25,
        "restart_s": 16.0,
        "goodput": round(10.0 / result.wall_s, 6),
    }
    assert recorded_goodput == 10.0 / (result.wall_s - 0.5 - 0.125)  # at step 12, before its checkpoint
    assert json.loads((run.logs / STARTS_FILE).read_text().splitlines()[-1]).items() >= result.record().items()


@pytest.mark.parametrize("outcome", ["failed", "killed", "stopped", "done"])
@pytest.mark.parametrize("steps", [1, 4, 30, 90])
def test_a_restart_has_a_line_only_if_the_failed_start_had_none_and_the_run_goes_on(
    run: Run, outcome: str, steps: int
) -> None:
    run.start(0, 10, outcome)
    ended = outcome in ("done", "stopped")
    assert len(run.said) == ended
    run.said.clear()
    began = run.machine().up
    run.start(8, 8 + steps, "done")
    lasts = run.machine().up - began > 60 + 11
    assert len(run.said) == 1 + (lasts and not ended)
    if len(run.said) > 1:
        first, last = ([float(x) for x in re.findall(r"productive of ([0-9.]+)", line)] for line in run.said)
        assert first != last, "the same line twice"


def test_people_get_a_line_at_the_end(run: Run) -> None:
    run.start(0, 10, "failed")
    run.start(8, 12, "stopped")
    assert run.said == [
        "goodput 23.8% over 2 starts: 10.0 s productive of 42.0 s; lost 2 steps (2.0 s), detection 250 ms, restart "
        "11.0 s, checkpoints 1.5 s, first start 11.0 s, evaluation 6.0 s, after the last step 250 ms",
    ]
    run.said.clear()
    alone = Run(run.logs.parent / "alone", said=run.said)
    alone.start(0, 400, "done", load_s=7200.0, tail_s=0.0)
    assert run.said == [
        "goodput 5.1% over 1 start: 6.7 min productive of 2.2 h; checkpoints 50.0 s, first start 2.0 h, "
        "evaluation 3.3 min"
    ]


def test_steps_that_are_lost_twice_count_twice_and_never_more(run: Run) -> None:
    """A damaged checkpoint sends the third start behind the second: 5 to 10, and 9 to 11 again."""
    run.start(0, 10, "failed")
    run.start(8, 11, "killed")
    run.start(4, 12, "stopped")
    run.start(12, 16, "done")
    result = run.parts()
    assert result.lost_steps == 6 + 3
    assert result.lost_s == 6.0 + 2.0  # the first step after a start counts as restart
    assert result.productive_s == 3.0 + 0.0 + 7.0 + 3.0
    assert total(result) == pytest.approx(result.wall_s, abs=1e-9)


def test_a_run_from_scratch_in_the_same_folder_has_lost_all(run: Run) -> None:
    run.start(0, 10, "failed")
    run.start(0, 10, "done")
    assert (run.parts().lost_steps, run.parts().productive_s) == (10, 9.0)


def test_starts_that_come_to_no_step_are_restarts(run: Run) -> None:
    run.start(0, 0, "failed")
    run.start(0, 6, "killed")
    run.start(4, 4, "killed")
    run.start(4, 8, "done")
    result = run.parts()
    assert result.start_s == 10.25
    assert (result.restart_s, result.detect_s) == (11.0 + 10.25 + 11.0, 0.25)
    assert (result.lost_steps, result.productive_s) == (2, 3.0 + 3.0)
    assert total(result) == pytest.approx(result.wall_s, abs=1e-9)


def test_what_passes_after_the_end_of_a_run_is_not_its_time_and_a_preemption_is(run: Run) -> None:
    run.start(0, 4, "stopped")
    run.machine.wait(1000.0)
    run.start(4, 8, "done")
    assert run.parts().restart_s == 1000.0 + 11.0
    assert run.parts().detect_s == 0.0
    run.machine.wait(1e6)
    run.start(8, 12, "done")
    assert run.parts().restart_s == 1000.0 + 11.0 + 11.0
    assert run.parts().wall_s < 2000.0


@pytest.mark.parametrize("jump", [-3600.0, 86_400.0])
def test_jumps_of_the_wall_clock_change_nothing_on_one_machine(run: Run, jump: float) -> None:
    straight = Run(run.logs.parent / "straight")
    for one in (run, straight):
        one.start(0, 10, "killed")
        one.machine.wall += jump if one is run else 0.0
        one.machine.wait(3.0)
        one.start(8, 12, "done")
    assert run.parts() == straight.parts()


def test_after_another_boot_the_wall_clock_tells_the_gap_and_never_less_than_none(run: Run) -> None:
    run.start(0, 10, "killed")
    run.machine.wait(40.0)
    run.machine.boot, run.machine.up = "second", 3.0
    run.start(8, 10, "killed")
    assert run.parts().restart_s == 40.0 + 11.0
    run.machine.boot, run.machine.wall = "third", run.machine.wall - 7200.0
    run.start(8, 12, "done")
    assert run.parts().restart_s == 40.0 + 11.0 + 11.0
    assert total(run.parts()) == pytest.approx(run.parts().wall_s, abs=1e-6)


def test_the_time_of_a_step_that_nobody_logged_is_shared_out(run: Run) -> None:
    """The second start goes on in the midst of what the first logged in one piece: 4 of 6 s between steps 2 and 8."""
    machine = run.machine
    meter = GoodputMeter(run.logs, run.said.append, machine(), machine)
    meter.begin(0)
    for step, seconds in ((1, 1.0), (2, 1.0), (8, 6.0)):
        machine.wait(seconds)
        meter.measure(step)
    meter.end("failed")
    run.start(6, 8, "done")
    assert (run.parts().lost_steps, run.parts().lost_s) == (2, 2.0)


@pytest.mark.parametrize("file", [STARTS_FILE, START_FILE])
def test_torn_and_foreign_lines_are_left_out(run: Run, file: str) -> None:
    run.start(0, 10, "killed")
    whole = (run.logs / file).read_bytes()
    for size in range(0, len(whole), 7):
        (run.logs / file).write_bytes(whole[:size])
        (start,) = read(run.logs)
        assert start.spent.step == 10 * (file == STARTS_FILE)  # a file of the two has all that is known of a start
    (run.logs / file).write_bytes(whole[:-20] + b'\xff\x00\n[]\n7\n{}\n{"event": "log"')
    run.start(8, 12, "done")
    result = run.parts()
    assert [start.outcome for start in read(run.logs)] == ["killed", "done"]
    assert result.wall_s == pytest.approx(total(result), abs=1e-9)
    assert result.productive_s == (10.0 if file == STARTS_FILE else 3.0)


@pytest.mark.parametrize("event", ["start", "end"])
def test_either_line_of_a_start_tells_all_of_it(run: Run, event: str) -> None:
    """An end that nobody tells is that of a start that was killed."""
    run.start(0, 8, "stopped")
    run.start(8, 12, "done")
    before, lines = run.parts(), [line for line in (run.logs / STARTS_FILE).read_text().splitlines() if line]
    assert [json.loads(line)["event"] for line in lines] == ["start", "end"] * 2
    del lines[2 if event == "start" else 1]
    (run.logs / STARTS_FILE).write_text("\n".join(lines))
    if event == "start":
        assert run.parts() == before
    else:
        assert [(start.outcome, start.spent.step) for start in read(run.logs)] == [("killed", 0), ("done", 12)]


def test_a_start_that_is_killed_as_it_writes_keeps_what_the_one_before_left(run: Run) -> None:
    """Whatever part of its first lines is there: its own, and that by which it closes the one before."""
    run.start(0, 10, "killed")
    before, latest = (run.logs / STARTS_FILE).read_bytes(), (run.logs / START_FILE).read_bytes()
    (expected,) = read(run.logs)
    run.machine.wait(5.0)
    GoodputMeter(run.logs, clock=run.machine).begin(8)
    added = (run.logs / STARTS_FILE).read_bytes()[len(before) :]
    for size in range(0, len(added) + 1, 5):
        (run.logs / STARTS_FILE).write_bytes(before + added[:size])
        (run.logs / START_FILE).write_bytes(latest)  # which is replaced after both lines
        first, *later = read(run.logs)
        assert replace(first, outcome="") == expected
        assert len(later) == (size >= len(added) - 1)
        GoodputMeter(run.logs, clock=run.machine).begin(8)
        assert read(run.logs)[0] == replace(expected, outcome="killed")
        assert all(not start.spent.total_s for start in read(run.logs)[1:])


def test_what_cannot_be_written_now_is_before_anything_takes_its_place(run: Run) -> None:
    run.start(0, 10, "killed")
    file = run.logs / STARTS_FILE
    begun = file.read_bytes()
    file.unlink()
    file.mkdir()  # no file can be opened there
    meter = GoodputMeter(run.logs, clock=run.machine)
    meter.begin(8)
    meter.measure(9)
    assert read(run.logs)[-1].spent.step == 10
    file.rmdir()
    file.write_bytes(begun)
    meter.measure(10)
    assert [(start.outcome, start.resumed, start.spent.step) for start in read(run.logs)] == [
        ("killed", 0, 10),
        ("", 8, 10),
    ]


def test_the_files_do_not_grow_with_the_run(run: Run) -> None:
    """4000 logged steps, a fourth of them with a checkpoint, of which the newest tell exactly what was lost."""
    meter = GoodputMeter(run.logs, began=run.machine(), clock=run.machine)
    meter.begin(0)
    for step in range(1, 4_001):
        run.machine.wait(1.0 + step % 7 / 8)
        meter.measure(step)
        if step % 4 == 0:
            meter.enter(step, "checkpoint")
            meter.saved(0.5, 3.0)
            meter.finish(step)
    sizes = [(run.logs / name).stat().st_size for name in (STARTS_FILE, START_FILE)]
    assert max(sizes) < 2048, sizes
    (start,) = read(run.logs)
    assert len(start.course) <= MOST_POINTS
    steps = [step for step, _ in start.course]
    assert steps[-EXACT_POINTS:] == list(range(4_004 - 4 * EXACT_POINTS, 4_001, 4))
    meter.end("failed")
    run.machine.wait(5.0)
    resumed = 3_996
    GoodputMeter(run.logs, clock=run.machine).begin(resumed)
    lost_s = sum(1.0 + step % 7 / 8 for step in range(resumed + 1, 4_001))
    assert run.parts().lost_s == pytest.approx(lost_s, abs=1e-9)
    # Further back than checkpoints are kept, to within what a step differs from others.
    (run.logs / STARTS_FILE).write_text((run.logs / STARTS_FILE).read_text().replace(f": {resumed}", ": 2002"))
    exact_s = sum(1.0 + step % 7 / 8 for step in range(2003, 4_001))
    assert run.parts().lost_s == pytest.approx(exact_s, abs=2.0)


def test_a_disk_that_fails_costs_the_count_and_not_the_run(run: Run) -> None:
    run.logs.parent.mkdir(exist_ok=True)
    run.logs.write_text("a file where the folder should be")
    assert 0.2 < run.start(0, 12, "done") < 0.4
    assert run.parts() == Goodput()


def test_costs_of_checkpoints_are_kept(run: Run) -> None:
    run.start(0, 10, "done")
    spent = read(run.logs)[-1].spent
    assert (spent.saves, spent.save_stall_s, spent.save_write_s) == (2, 1.0, 6.0)


def test_a_start_keeps_of_earlier_ones_only_where_they_stand(run: Run) -> None:
    for resumed, last in ((0, 40), (20, 30), (24, 60)):
        run.start(resumed, last, "failed")
    meter = GoodputMeter(run.logs, clock=run.machine)
    meter.begin(28)
    assert [past.course for past in meter._past] == [((20, 19.0),), ((24, 3.0),), ((28, 3.0),)]
    assert math.isclose(meter.read().productive_s, run.parts().productive_s)


def test_a_process_knows_when_it_was_started() -> None:
    """Half a second of sleep before Python begins counts, since exec leaves the process as it is."""
    code = "from nxtrain.common.process.clock import *; print(now().since(process_began()))"
    before = time.monotonic()
    done = subprocess.run(
        ["sh", "-c", f"sleep 0.5; exec {sys.executable} -c '{code}'"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=dict(os.environ),
    )
    if Path("/proc/self/stat").exists():
        assert 0.5 <= float(done.stdout) + 0.02 <= time.monotonic() - before + 0.04


def test_where_the_system_does_not_tell_a_process_begins_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "Path", lambda path: Path("/nowhere"))
    assert clock.now().up - process_began().up < 0.1
    first = Instant("", 5.0, 100.0)
    assert replace(first, up=1.0, wall=103.0).since(first) == 3.0
