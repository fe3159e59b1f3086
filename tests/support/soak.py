"""A run that something befalls every few seconds: what, where and when is drawn from a seed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from random import Random

from nxtrain.checkpoint import directory
from nxtrain.common.run_folder import LOGS_DIR
from nxtrain.metrics.goodput import account
from nxtrain.metrics.start_log import read
from nxtrain.plan.goodput import Failures
from tests.support.command_ranks import WORLD
from tests.support.recovery import EVERY, Golden, History, assert_recovered, configure, last_step, start, supervise
from tests.support.runs import records

DEADLY = ("kill", "segv", "exit", "raise", "oom")
HANGING = ("hang", "gil", "stop")
STOPPING = ("term", "usr1", "int")
IN_STEP = ("pre_step", "fwd", "bwd", "reduce", "opt", "post_step", "data")
BY_ALL = ("ckpt_stage", "ckpt_write", "ckpt_fsync")
BY_LEADER = ("ckpt_commit", "ckpt_rename", "ckpt_latest")
ERRORS = ("ENOSPC", "EIO", "EROFS", "EACCES")

DAMAGED_SHARE = 0.15
"""Of the restarts, those before which a bit of the newest checkpoint is turned over."""

MARGIN = 0.10
"""By which the goodput may be below that of the model, whose failures come at random in time, not at chosen points."""

PATIENCE_S = 3.0
"""Within which ranks find out that another hangs."""


@dataclass(frozen=True)
class Report:
    seed: int
    steps: int
    faults: int
    restarts: int
    repeated: int
    productive_s: float
    wall_s: float
    costs: Failures
    expected: float
    history: History

    @property
    def goodput(self) -> float:
        """Share of the time in which the run got further."""
        return self.productive_s / self.wall_s

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.steps} steps as if nothing had happened; {self.faults} faults, "
            f"{self.restarts} restarts, {self.repeated} steps repeated; {self.productive_s:.1f} s of steps in "
            f"{self.wall_s:.1f} s: goodput {self.goodput:.1%}; the model says {self.expected:.1%}, at a failure after "
            f"{self.costs.mtbf_s:.1f} s, {self.costs.detect_s:.1f} s until the next step, and checkpoints that stall "
            f"{1e3 * self.costs.stall_s:.0f} ms and are written in {1e3 * self.costs.write_s:.0f} ms"
        )


def drawn(seed: int, steps: int, mean_steps: float) -> list[str]:
    """Faults of all kinds at all points of a run."""
    random = Random(seed)
    result = [f"{random.choice(DEADLY)}@{random.randrange(WORLD)}:0:load"]
    at = 0
    while (at := at + 1 + round(random.expovariate(1 / mean_steps))) <= steps:
        result.append(_drawn_at(random, at, steps))
    return list(dict.fromkeys(result))


def _drawn_at(random: Random, step: int, steps: int) -> str:
    rank = random.randrange(WORLD)
    (family,) = random.choices(("deadly", "checkpoint", "disk", "stopping", "hanging"), (5, 4, 2, 2, 1))
    if family == "deadly":
        return f"{random.choice(DEADLY)}@{rank}:{step}:{random.choice(IN_STEP)}"
    if family == "stopping":
        return f"{random.choice(STOPPING)}@{rank}:{step}:{random.choice(IN_STEP[:-1])}"
    if family == "hanging":
        return f"{random.choice(HANGING)}@{rank}:{step}:{random.choice(IN_STEP[:-1])}"
    point = random.choice((*BY_ALL, *BY_LEADER))
    where = f"{0 if point in BY_LEADER else rank}:{max(EVERY, step // EVERY * EVERY)}:{point}"
    if family == "checkpoint" or point == "ckpt_stage":  # which touches no disk
        return f"{random.choice(DEADLY)}@{where}" + f":{random.randrange(1 << 16)}" * (point == "ckpt_write")
    # The last checkpoint must be there: what cannot be written then ends the run, and is tried again.
    return f"oserror@{where}:{random.choice(ERRORS)}"


def soak(
    started_by: ForkServerContext,
    folder: Path,
    seed: int,
    *,
    steps: int,
    mean_steps: float,
    pace_s: float,
    print_line: Callable[[str], object] = lambda line: None,
) -> Report:
    """Break a run again and again, start it again each time, and hold it against the uninterrupted one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("golden", "soaked"):
        configure(folder / name, steps=steps, patience_s=PATIENCE_S)
    golden = Golden.of(supervise(started_by, folder / "golden", within_s=600.0))
    faults, damages = drawn(seed, steps, mean_steps), Random(seed)
    history = History(folder / "soaked")
    armed = [f"sleep@*:1:pre_step:{pace_s}", *faults]
    damaged = 0
    begin = time.monotonic()
    while not history.starts or history.starts[-1].code:
        assert len(history.starts) <= len(faults) + damaged, history.said
        if damages.random() < DAMAGED_SHARE:
            damaged += _damage(history.checkpoints, damages)
        actual = start(started_by, history.folder, armed, within_s=600.0)
        history.starts.append(actual)
        fires = [line for text in actual.said.values() for line in text.splitlines() if " fires in step " in line]
        print_line(f"after step {actual.began_after} to {actual.reached}, exit code {actual.code}; {'; '.join(fires)}")
    history.wall_s = time.monotonic() - begin
    assert_recovered(history, golden, restarts=None, within_s=600.0)
    costs, expected = modelled(history)
    report = Report(
        seed,
        steps,
        len(history.fired) + damaged,
        len(history.starts) - 1,
        sum(history.repeated),
        sum(float(record["step_time_s"]) for record in records(history.run)),
        history.wall_s,
        costs,
        expected,
        history,
    )
    assert report.goodput >= report.expected - MARGIN, report
    return report


def modelled(history: History) -> tuple[Failures, float]:
    """Costs of failures and checkpoints in a run, and the model's goodput for these costs.

    Faults strike in steps and saves, so that the time between them is counted there, and nothing fails from one until
    the next step; of the model's parts that is detection. All is measured by the run's own meter but the wall time and
    the number of starts, of which some are killed before they tell anything.
    """
    starts = read(history.run / LOGS_DIR)
    spent, parts, failures = [start.spent for start in starts], account(starts), len(history.starts) - 1
    saves = max(1, sum(one.saves for one in spent))
    step_s = sum(one.train_s for one in spent) / sum(
        max(0, one.step - start.resumed - 1) for one, start in zip(spent, starts, strict=True)
    )
    untold_s = history.wall_s - parts.wall_s
    response_s = (parts.detect_s + parts.restart_s + untold_s) / failures - step_s  # the meter counts first steps in
    start_s = parts.start_s - step_s
    costs = Failures(
        mtbf_s=(history.wall_s - start_s) / failures - response_s,
        stall_s=sum(one.save_stall_s for one in spent) / saves,
        write_s=sum(one.save_write_s for one in spent) / saves,
        detect_s=response_s,
    )
    work_s, interval_s = last_step(history.folder) * step_s, max(EVERY * step_s, costs.write_s)
    return costs, work_s / (start_s + costs.run_s(work_s, interval_s, 0.0))


def _damage(checkpoints: Path, random: Random) -> bool:
    """Turn over a bit of a file of the newest checkpoint, if there is another one."""
    result = directory.list_checkpoints(checkpoints)
    if len(result) == 1 or not result:
        return False
    file = random.choice(sorted(path for path in result[-1].iterdir() if path.name != directory.VERIFIED))
    content = bytearray(file.read_bytes())
    content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)
    return True
