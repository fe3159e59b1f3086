"""Reader of a run's metrics file into numpy arrays, in blocks of many lines.

A running run may still write the file, and the file may be damaged. Every line that is not a JSON object with a step is
skipped and counted.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import json as arrow_json

from nxtrain.common.io.jsonl import is_begun, parse
from nxtrain.common.io.regular import open_regular
from nxtrain.common.process.progress import Progress
from nxtrain.metrics.routers import EXPERT_SLOTS, ROUTER_NUMBERS
from nxtrain.metrics.status import KINDS_S, PREFERENCES, SECTIONS_S

Column = NDArray[np.float64]

NUMBERS = (
    *(
        "loss",
        "z_loss",
        "noise_scale",
        "val_loss",
        "grad_norm",
        "grad_norm_mean",
        "grad_norm_lowest",
        "param_norm",
        "param_norm_0",
    ),
    *("param_norm_expected", "lost_update_frac", "lr", "tokens", "tokens_per_s", "step_time_s", "mfu", "goodput"),
    *("peak_memory_bytes", *KINDS_S, *SECTIONS_S, "pairs", "answers", *PREFERENCES),
    *("aux_loss", *(key for key in ROUTER_NUMBERS if key != EXPERT_SLOTS)),
)
"""Keys of a metrics record whose values are numbers."""

KEYS = ("step", *NUMBERS)

BLOCK_BYTES = 1 << 25  # bytes that are parsed at once; a longer line counts as damaged
FEW_BYTES = 1 << 16  # smaller parts that pyarrow cannot parse are parsed by Python line by line
MOST = 1e100  # largest magnitude that is drawn; sums and differences of such numbers are finite
MOST_STEP = 2.0**53  # largest step that a float64 represents exactly
MOST_ALARMS = 2000  # maximum number of alarms that are kept, the newest ones; all are counted


@dataclass(frozen=True)
class Columns:
    """Metrics of a run as arrays, in the order of steps."""

    steps: Column = field(default_factory=lambda: np.empty(0))  # (N,) steps, rising
    numbers: Mapping[str, Column] = field(default_factory=dict)  # (N,) values by key; NaN where a record has none
    alarms: tuple[tuple[int, str], ...] = ()  # steps and texts of the newest alarms
    num_alarms: int = 0
    skipped: tuple[int, ...] = ()  # steps without an update of the parameters
    spikes: tuple[tuple[int, int], ...] = ()  # first step and length of each spike of the gradient norm, in steps
    damaged: int = 0  # number of damaged lines, which are skipped
    torn: bool = False  # True if the last line is incomplete
    repeated: int = 0  # number of records that a later record of the same step replaces

    def series(self, key: str) -> tuple[Column, Column]:
        """Steps and values of one metric, without the records that lack it."""
        values = self.numbers.get(key)
        if values is None:
            return np.empty(0), np.empty(0)
        is_finite = np.isfinite(values)
        return self.steps[is_finite], values[is_finite]

    def last(self, key: str) -> float | None:
        """Newest value of a metric; None if no record has it."""
        _, values = self.series(key)
        if not len(values):
            return None
        return float(values[-1])


def read_columns(file: Path) -> Columns:
    """Read a run's metrics file into arrays."""
    reader = _ColumnsReader()
    with open(open_regular(file), "rb") as lines:
        size_bytes = os.fstat(lines.fileno()).st_size
        with Progress(f"reading {file}", size_bytes, on_terminals_only=True) as progress:
            # A block has whole lines, except that the file's last line, or an overlong line, may lack its line feed.
            for block in iter(lambda: lines.read(BLOCK_BYTES), b""):
                whole = block
                if not block.endswith(b"\n"):
                    whole += lines.readline(BLOCK_BYTES)
                reader.add(whole)
                progress.show(lines.tell())
    return reader.columns()


class _ColumnsReader:
    """Parser of a metrics file that collects the arrays of all blocks."""

    def __init__(self) -> None:
        self._tables: list[dict[str, Column]] = []
        self._alarms = deque[tuple[int, str]](maxlen=MOST_ALARMS)
        self._num_alarms = 0
        self._skipped: set[int] = set()
        self._spikes: set[tuple[int, int]] = set()
        self._damaged = 0
        self._torn = False

    def add(self, block: bytes) -> None:
        self._torn = not block.endswith(b"\n")
        end = block.rfind(b"\n") + 1
        self._add_lines(block[:end])
        if end == len(block):
            return
        rest = block[end:]
        record = parse(rest.decode(errors="replace"))
        if record is not None:
            self._add_records([record])
        elif rest.strip() and not is_begun(rest):
            self._torn = False
            self._damaged += 1

    def _add_lines(self, whole: bytes) -> None:
        table = _parsed(whole)
        if table is not None:
            counted = self._add_numbers({key: table[key].to_numpy() for key in KEYS})
            texts = table.select(["step", "alarm", "skipped_steps", "spikes"])
            has_text = np.zeros(len(counted), dtype=bool)
            for key in ("alarm", "skipped_steps", "spikes"):
                has_text |= np.asarray(texts[key].is_valid().to_numpy())
            for record in texts.filter(pa.array(has_text & counted)).to_pylist():
                self._add_texts(record)
            return
        # Python takes five times as long as pyarrow, so only lines near the rejected line are parsed by Python.
        middle = whole.find(b"\n", len(whole) // 2) + 1
        if len(whole) > FEW_BYTES and 0 < middle < len(whole):
            self._add_lines(whole[:middle])
            self._add_lines(whole[middle:])
            return
        records = []
        for line in whole.split(b"\n"):
            record = parse(line.decode(errors="replace"))
            if record is not None:
                records.append(record)
            elif line.strip():
                self._damaged += 1
        self._add_records(records)

    def _add_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add records that Python parsed, with those of their values that are numbers."""
        numbers: dict[str, Column] = {}
        for key in KEYS:
            numbers[key] = np.array([number_of(record.get(key)) for record in records], dtype=np.float64)
        for record in compress(records, self._add_numbers(numbers)):
            self._add_texts(record)

    def _add_numbers(self, numbers: Mapping[str, Column]) -> NDArray[np.bool_]:
        """Add the numbers of a block, and return a mask of its valid records.

        A record is valid if its step is an integer from 0. Numbers too large to draw become NaN.
        """
        steps = numbers["step"]
        counted = np.asarray((steps >= 0) & (steps <= MOST_STEP) & (np.floor(steps) == steps))
        self._damaged += int(len(counted) - counted.sum())
        drawn = {key: np.where(np.abs(values) <= MOST, values, np.nan) for key, values in numbers.items()}
        self._tables.append({key: values[counted] for key, values in drawn.items()})
        return counted

    def _add_texts(self, record: Mapping[str, Any]) -> None:
        alarm = record.get("alarm")
        if isinstance(alarm, str):
            self._num_alarms += 1
            self._alarms.append((int(record["step"]), alarm))
        self._skipped.update(step for step in _list(record.get("skipped_steps")) if _is_count(step))
        for spike in _list(record.get("spikes")):
            pair = _list(spike)
            if len(pair) == 2 and _is_count(pair[0]) and _is_count(pair[1]):  # noqa: PLR2004 - step and length
                self._spikes.add((pair[0], pair[1]))

    def columns(self) -> Columns:
        """Join the metrics of all blocks of the file into one set of arrays."""
        whole = {}
        for key in KEYS:
            whole[key] = np.concatenate([np.empty(0), *(table[key] for table in self._tables)])
        steps = whole.pop("step")
        order = np.arange(len(steps))
        if len(steps) > 1 and not np.all(np.diff(steps) > 0):
            # The last record of a step counts.
            order = len(steps) - 1 - np.unique(steps[::-1], return_index=True)[1]
        return Columns(
            steps[order],
            {key: values[order] for key, values in whole.items() if np.isfinite(values[order]).any()},
            tuple(self._alarms),
            self._num_alarms,
            tuple(sorted(self._skipped)),
            tuple(sorted(self._spikes)),
            self._damaged,
            self._torn,
            len(steps) - len(order),
        )


_SCHEMA = pa.schema(
    [
        *((key, pa.float64()) for key in KEYS),
        ("alarm", pa.string()),
        ("skipped_steps", pa.array([[0]]).type),
        ("spikes", pa.array([[[0]]]).type),
    ]
)


def _parsed(lines: bytes) -> pa.Table | None:
    """Parse lines with pyarrow; None if a line is damaged, or a value has an unexpected type.

    pyarrow ends the process at a lone `null`, and accepts two objects in one line. So pyarrow only gets lines with
    exactly one pair of braces around them.
    """
    num_lines = lines.count(b"\n")
    braced = lines.startswith(b"{") and lines.endswith(b"}\n") and lines.count(b"}\n{") == num_lines - 1
    if not braced or lines.count(b"{") != num_lines or lines.count(b"}") != num_lines:
        return None
    try:
        return arrow_json.read_json(
            pa.BufferReader(lines),
            read_options=arrow_json.ReadOptions(block_size=1 << 22),
            parse_options=arrow_json.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="ignore"),
        )
    except (pa.ArrowException, ValueError):
        return None


def number_of(value: object) -> float:
    """Convert a number to float; NaN for any other value, and for an integer beyond the range of a float."""
    if type(value) is float:  # the type of nearly all values, of which there may be millions
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def _list(value: object) -> list[Any]:
    if isinstance(value, list):
        return value
    return []


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_STEP
