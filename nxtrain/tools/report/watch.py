"""`nxtrain watch`: follow runs from another terminal, with one line per run, from the files that the runs write."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from nxtrain.common.errors import ConfigError
from nxtrain.common.io.jsonl import is_begun, parse
from nxtrain.common.io.regular import open_regular, read_text
from nxtrain.common.process.console import PipeSafeConsole
from nxtrain.common.run_folder import CHECKPOINTS_DIR, CONFIG_FILE, LATEST_FILE, LOGS_DIR, METRICS_FILE, START_FILE
from nxtrain.common.text import short
from nxtrain.metrics.status import KINDS_S, SECTIONS_S, details, duration
from nxtrain.tools.report.run import number_at
from nxtrain.tools.report.verdict import UNDECIDED, verdict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TAIL_BYTES = 1 << 16  # bytes at the end of a metrics file that are read first; earlier records are skipped
JUDGED = 20  # number of newest records whose times the verdict uses
SILENT_S = 120.0  # seconds without a heartbeat after which the run's line reports silence

ENDED = ("done", "stopped")  # outcomes after which a run is no longer followed; a failed run may be restarted


class Followed:
    """Run folder that is followed while the run writes to it; the run need not have started."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock
        self._offset, self._rest = -1, b""
        self._record: dict[str, Any] = {}
        self._val_loss: float | None = None
        self._times: deque[Mapping[str, float]] = deque(maxlen=JUDGED)
        self._is_damaged = False

    def line(self) -> tuple[str, bool]:
        """Current line of the run, and True if the run has ended."""
        for record in self._news():
            self._record = record
            times_s = {key: number_at(record, key) for key in (*KINDS_S, *SECTIONS_S)}
            self._times.append({key: time_s for key, time_s in times_s.items() if time_s is not None})
            self._val_loss = number_at(record, "val_loss") or self._val_loss
        start: dict[str, Any] = {}
        config: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            start = parse(read_text(self._folder / LOGS_DIR / START_FILE)) or {}
        with suppress(OSError, ValueError, RecursionError):
            config = tomllib.loads(read_text(self._folder / CONFIG_FILE))
        total = 0.0
        if isinstance(config.get("train"), dict):
            total = number_at(config["train"], "steps") or 0.0
        step = max(number_at(self._record, "step") or 0.0, number_at(start, "step") or 0.0)
        progress = f"step {step:.0f}"
        if total:
            progress += f"/{total:.0f}"
        parts = [progress, *self._values()]
        if self._is_damaged:
            parts.append(f"{METRICS_FILE} is damaged")
        left_s = _left_s(start, total)
        if left_s is not None and not start.get("outcome"):
            parts.append(f"{duration(left_s)} left")
        parts.append(self._state(start))
        line = "  ".join(filter(None, parts))
        return "".join(char if char.isprintable() else "\ufffd" for char in line), start.get("outcome") in ENDED

    def _values(self) -> Iterator[str]:
        loss = number_at(self._record, "loss")
        if loss is not None:
            yield f"loss {loss:.4f}"
        if self._val_loss is not None:
            yield f"val {self._val_loss:.4f}"
        speed = number_at(self._record, "tokens_per_s")
        if speed is not None:
            yield f"{short(speed)} tokens/s"
        record = dict(self._record)
        with suppress(OSError, ValueError):
            newest = re.fullmatch(r"step-(\d{8,18})\s*", read_text(self._folder / CHECKPOINTS_DIR / LATEST_FILE))
            if newest:
                record["saved_step"] = int(newest[1])  # the save of a step follows its record
        yield from details(record)
        sums = Counter[str]()  # sums over several records, since one record with an evaluation is not typical
        for times_s in self._times:
            sums.update(times_s)
        limit = verdict(sums, mfu=number_at(self._record, "mfu"))
        name = limit.partition(":")[0]
        if name and name != UNDECIDED:
            yield name
        alarm = self._record.get("alarm")
        if isinstance(alarm, str):
            yield f"ALARM {alarm}"

    def _state(self, start: dict[str, Any]) -> str:
        """Outcome of the run, or the time since its last heartbeat if that is long."""
        outcome = start.get("outcome")
        if outcome and start.get("why"):
            return f"{outcome}: {start['why']}"
        if outcome:
            return str(outcome)
        seen = number_at(start, "wall")
        if seen is None:
            return "" if self._record else "has not begun"
        silent_s = self._clock() - seen
        if silent_s > SILENT_S:
            return f"silent for {duration(silent_s)}"
        return ""

    def _news(self) -> Iterator[dict[str, Any]]:
        """Yield the records that were written since the last call.

        After a resume, which shortens the file, the records at its end are yielded.
        """
        with suppress(OSError), open(open_regular(self._folder / METRICS_FILE), "rb") as file:
            size, is_cut = file.seek(0, 2), False  # the first line may be incomplete
            if not 0 <= self._offset <= size:
                self._offset = max(0, size - TAIL_BYTES)
                self._rest = b""
                self._is_damaged = False
                is_cut = self._offset > 0
            file.seek(self._offset)
            content = self._rest + file.read(size - self._offset)
            self._offset = size
            *lines, self._rest = content.split(b"\n")
            if self._rest and not is_begun(self._rest):
                self._is_damaged = True
            records = []
            for number, line in enumerate(lines):
                record = parse(line)
                if record is not None and "step" in record:
                    records.append(record)
                elif line.strip() and not (is_cut and number == 0):
                    self._is_damaged = True
            yield from records


def watch(folders: Sequence[Path], *, once: bool = False, every_s: float = 0.0, console: Console | None = None) -> None:
    """Show one line per run until all runs have ended.

    Args:
        once: Show each line once and return.
        every_s: Seconds between updates; 0: one second on a terminal, else a minute.
    """
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder; name the folder of a run, which is the value of run.dir")
    console = console or PipeSafeConsole(highlight=False, soft_wrap=True, markup=False)
    runs = [Followed(folder) for folder in folders]
    prefixes = [""]
    if len(folders) > 1:
        prefixes = [f"{folder.resolve().name}  " for folder in folders]
    live = None
    if console.is_terminal and not once:
        live = Live(console=console, auto_refresh=False)
    shown: list[str] = []
    with live or nullcontext(), suppress(KeyboardInterrupt):
        while True:
            states = [run.line() for run in runs]
            lines = [prefix + line for prefix, (line, _) in zip(prefixes, states, strict=True)]
            if live is not None:
                live.update(Text("\n".join(lines)), refresh=True)
            else:
                for line in lines:
                    if line not in shown:
                        console.print(line, markup=False)
            shown = lines
            if once or all(ended for _, ended in states):
                return
            time.sleep(every_s or (1.0 if live is not None else 60.0))


def _left_s(start: dict[str, Any], total: float) -> float | None:
    """Estimated seconds until the last step, from the pace of this start without its first step; None if unknown."""
    step, resumed = number_at(start, "step"), number_at(start, "resumed")
    spent = [number_at(start, key) for key in ("train_s", "eval_s", "stall_s")]
    if not total or step is None or resumed is None or step - resumed <= 1 or None in spent:
        return None
    return (total - step) * sum(filter(None, spent)) / (step - resumed - 1)
