"""A run that is broken and started again until it is done, and what must then be true of it.

The one who starts it does what `nxtrain.launch.torchrun` does, without its seconds of imports: a store of their own for
the ranks of each start, a little time for those that outlive another, and no further start after a code that is final.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.manifest import DTYPES, read_manifest
from nxtrain.checkpoint.meta import read_meta
from nxtrain.common.process.clock import now
from nxtrain.common.run_folder import CHECKPOINTS_DIR, METRICS_FILE
from nxtrain.config.check import Resolved
from nxtrain.launch.exit_codes import FINAL
from nxtrain.launch.torchrun import STOPPED, exit_code_of
from tests.support.command_ranks import WORLD, Ranks, write_config
from tests.support.runs import course, run_plan, saved_steps

SAVED, RESHARDED_STEPS = 3, 8
"""The step of the checkpoint, and the last; five follow it."""

KEPT = ("step", "loss", "grad_norm", "param_norm", "lr", "tokens")


def plan(folder: Path, layout: dict[str, Any], rows: Path, **checkpoint: Any) -> Resolved:
    """A run of eight steps with one checkpoint after the third."""
    return run_plan(
        folder,
        {"source": "tokens", "path": str(rows)},
        steps=RESHARDED_STEPS,
        parallel=layout,
        optim={"lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 2, "decay_steps": RESHARDED_STEPS},
        checkpoint={"every": SAVED, "keep": 5, "async": True, **checkpoint},
    )


def after(folder: Path) -> list[dict[str, Any]]:
    return [{key: record[key] for key in KEPT} for record in course(folder) if record["step"] > SAVED]


SEQ_LEN = 16
"""As in the configuration of `command_ranks`."""

STEPS, EVERY = 12, 3

PACE = "sleep@*:1:pre_step:0.02"
"""A fault that slows each step, so that checkpoints get written between some of them."""

PATIENCE_S = 4.0
"""Within which ranks find out that another hangs."""

REPORT_WAIT_S = 2.0
"""Time that ranks have to end by themselves after another rank has ended."""

FAILED_SAVE = re.compile(r"(?:no checkpoint of step|fault (?:oserror|raise|oom)@\S+:ckpt_\S+ fires in step) (\d+)")
"""The step of a checkpoint that failed, or was left out."""

RESTART_S = 10.0
"""Within which all ranks are gone after the first."""


@dataclass(frozen=True)
class Start:
    codes: Mapping[int, int | None]
    said: Mapping[int, str]
    began_after: int | None
    reached: int
    saved: tuple[int, ...]
    recovery_s: float = 0.0
    span_s: tuple[float, float] = (0.0, 0.0)

    @property
    def code(self) -> int:
        codes = [code for code in self.codes.values() if code is not None]
        return exit_code_of([code for code in codes if code] or [0])


@dataclass
class History:
    folder: Path
    starts: list[Start] = field(default_factory=list)
    wall_s: float = 0.0

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def checkpoints(self) -> Path:
        return self.run / CHECKPOINTS_DIR

    @property
    def said(self) -> str:
        """Output of the ranks of all starts."""
        return "\n".join(text for start in self.starts for text in start.said.values())

    @property
    def resumed(self) -> list[int | None]:
        """The step after which each start but the first went on."""
        return [start.began_after for start in self.starts[1:]]

    @property
    def fired(self) -> set[str]:
        """The faults that befell it, as their files are named; without the pace."""
        return {path.name for path in (self.run / "faults").glob("*")}

    @property
    def repeated(self) -> list[int]:
        """Recorded steps that each start but the first computed again."""
        return [
            before.reached - after.began_after
            for before, after in zip(self.starts, self.starts[1:], strict=False)
            if after.began_after is not None
        ]


@dataclass(frozen=True)
class Golden:
    course: list[dict[str, Any]]
    tensors: Mapping[str, bytes]

    @staticmethod
    def of(history: History) -> Golden:
        assert [start.code for start in history.starts] == [0], history.said
        result = course(history.run)
        return Golden(result, tensors(directory.step_path(history.checkpoints, result[-1]["step"])))


def configure(folder: Path, *, steps: int = STEPS, every: int = EVERY, patience_s: float = PATIENCE_S) -> None:
    """Write the configuration of a run that may fail as often as it likes, and its data."""
    write_config(folder, steps=steps, every=every, recovery={"hang_timeout_s": patience_s, "max_same_step": 0})


def start(
    started_by: ForkServerContext,
    folder: Path,
    faults: Iterable[str] = (),
    *,
    overrides: Sequence[str] = (),
    world: int = WORLD,
    within_s: float = 120.0,
    meanwhile: Callable[[Ranks], object] = lambda ranks: None,
    first: Callable[[], object] | None = None,
) -> Start:
    """Start the ranks once, and see them all end."""
    ended_at, from_s = 0.0, now().up
    with Ranks(started_by, folder, *faults, overrides=overrides, world=world, first=first) as ranks:
        begin = time.monotonic()
        while any(process.is_alive() for process in ranks.processes):
            at = time.monotonic()
            assert at - begin < within_s, ranks.said()
            codes = [process.exitcode for process in ranks.processes]
            if any(codes):
                ended_at = ended_at or at
                if FINAL.intersection(codes) or at - ended_at > (within_s if STOPPED in codes else REPORT_WAIT_S):
                    break
            meanwhile(ranks)
            time.sleep(0.01)
        codes_of = {rank: process.exitcode for rank, process in enumerate(ranks.processes)}
        sessions = {process.pid or 0 for process in ranks.processes}
    assert not (left := members(sessions)), f"processes {left} outlive their ranks"
    said = ranks.said()
    recovery_s = time.monotonic() - ended_at if ended_at else 0.0
    saved = tuple(saved_steps(folder / "run"))
    return Start(codes_of, said, _began_after(said[0]), last_step(folder), saved, recovery_s, (from_s, now().up))


def supervise(
    started_by: ForkServerContext,
    folder: Path,
    faults: Iterable[str] = (),
    *,
    overrides: Sequence[str] = (),
    most_restarts: int = 3,
    within_s: float = 120.0,
    world: int = WORLD,
    first: Callable[[], object] | None = None,
) -> History:
    """Start a run with the same command until it is done, ends for good, or was started too often."""
    history = History(folder)
    begin = time.monotonic()
    for _ in range(most_restarts + 1):
        result = start(
            started_by, folder, (PACE, *faults), overrides=overrides, world=world, within_s=within_s, first=first
        )
        history.starts.append(result)
        if result.code == 0 or result.code in FINAL:
            break
    history.wall_s = time.monotonic() - begin
    return history


def assert_recovered(history: History, golden: Golden, *, restarts: int | None = 1, within_s: float = 120.0) -> None:
    """The oracle: nothing is lost, and no one can tell from the run that something befell it."""
    said = history.said
    assert history.starts[-1].code == 0, said
    assert restarts is None or len(history.starts) == restarts + 1, said
    assert course(history.run) == golden.course, said
    newest = directory.newest(history.checkpoints)
    assert newest == directory.step_path(history.checkpoints, golden.course[-1]["step"])
    assert tensors(newest) == golden.tensors
    meta = read_meta(newest)
    assert meta.tokens == meta.samples * SEQ_LEN == golden.course[-1]["tokens"]
    for before, after in zip(history.starts, history.starts[1:], strict=False):
        assert before.recovery_s < RESTART_S
        assert_little_repeated(before, after, meta.step)
    assert_tidy(history.checkpoints)
    assert history.wall_s < within_s, history.wall_s


def assert_little_repeated(before: Start, after: Start, last: int) -> None:
    """A start goes on from the newest checkpoint that is whole: the last that was due, or the one before it.

    The last that was due may have been under way. Those that failed, or of which a line says why they were left out, do
    not count. After the last step of the run the one before is waited for, and may be what failed.
    """
    said = (before.said[0], after.said[0])
    if after.began_after is not None:
        whole = (0, *before.saved)
        assert after.began_after == whole[max(-1 - after.said[0].count("is put aside as"), -len(whole))], said
    if before.began_after is not None:
        due = range(EVERY, min(before.reached, last - 1) + 1, EVERY)
        due_after = [step for step in due if step > before.began_after]
        failed = FAILED_SAVE.findall("".join(before.said.values()))
        written = [step for step in due_after if str(step) not in failed]
        assert (0, *before.saved)[-1] >= [before.began_after, before.began_after, *written][-2], said


def assert_tidy(checkpoints: Path) -> None:
    """A folder of checkpoints has these and what was put aside, and `latest` names the newest."""
    left = [path.name for path in checkpoints.iterdir() if ".tmp-" in path.name or ".old-" in path.name]
    assert not left, left
    newest = directory.newest(checkpoints)
    assert newest is not None
    assert (checkpoints / directory.LATEST).read_text(encoding="utf-8").strip() == newest.name


def tensors(checkpoint: Path) -> dict[str, bytes]:
    """The bytes of every part of every tensor of a checkpoint, by its name and offsets."""
    manifest = read_manifest(checkpoint)
    files = {name: (checkpoint / name).read_bytes() for name in manifest.files}
    results = {}
    for key, entry in manifest.tensors.items():
        for (offsets, sizes), file, begin in entry.parts():
            size = math.prod(sizes) * DTYPES[entry.dtype].itemsize
            results[f"{key}{list(offsets)}"] = files[file][begin : begin + size]
    return results


def last_step(folder: Path) -> int:
    """The last step in a run's record, whose last line may be torn."""
    file = folder / "run" / METRICS_FILE
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for line in reversed(lines):
        with suppress(ValueError):
            return int(json.loads(line)["step"])
    return 0


def members(sessions: set[int]) -> list[int]:
    """Living processes of some sessions; empty where there is no /proc."""
    results = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) in sessions and state != "Z":
                results.append(int(path.parent.name))
    return results


def _began_after(said: str) -> int | None:
    if "; data " not in said:
        return None
    line = said[said.index("; data ") :].splitlines()[0]
    return int(line.rpartition(" ")[2]) if "continues after step" in line else 0
