"""Output of the commands of `nxtrain data` for people: a progress bar or plain lines, and tables."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from nxtrain.common.process.console import standard_error
from nxtrain.common.process.signals import Signals
from nxtrain.common.text import size
from nxtrain.data.arrow.preparation import PreparationOutcome, Watcher
from nxtrain.data.arrow.work import Counts

_LINE_SECONDS = 10.0
"""Time between two plain lines."""


class ConsoleWatcher(Watcher):
    """Progress on standard error: a bar on a terminal, else a line every ten seconds, until the context ends."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._console = standard_error()
        self._bar: Progress | None = None
        self._total, self._shown = 0, time.monotonic()

    def __enter__(self) -> ConsoleWatcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def begin(self, what: str, num_bytes: int) -> None:
        """Show the sources, and start a bar on a terminal."""
        self._console.print(f"sources: {what}, {size(num_bytes)}", markup=False)
        self._total = num_bytes
        if self._console.is_terminal:
            columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.description}"), console=self._console)
            self._bar.add_task("", total=num_bytes)
            self._bar.start()

    def advance(self, num_bytes: int, counts: Counts) -> None:
        """Move the bar, or print a line if the last line is ten seconds old."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=num_bytes, description=f"{counts.documents:,} documents")
        elif time.monotonic() - self._shown >= _LINE_SECONDS:
            self._shown = time.monotonic()
            share = num_bytes / max(self._total, 1)
            self._console.print(
                f"{size(num_bytes)} of {size(self._total)} ({share:.0%}), {_rows(counts)}", markup=False
            )

    def bad(self, text: str) -> None:
        """Print a skipped row."""
        self._console.print(f"skipped: {text}", markup=False)

    def asked_to_stop(self) -> str:
        """Name of the first signal."""
        return self._signals.asked

    def end(self, outcome: PreparationOutcome) -> None:
        """Print the counts of the result."""
        counts, outputs = outcome.summary, outcome.outputs
        if not outcome.is_new:
            self._console.print(f"nothing to do: {outputs.out} holds these sources already", markup=False)
        if not counts:
            return
        tokens = ""
        if counts["tokens"]:
            tokens = f", {counts['tokens']:,} tokens"
        line = f"{outputs.out}: {counts['documents']:,} documents, {size(counts['bytes'])} of text{tokens}"
        self._console.print(f"{line}; {counts['rows']:,} rows read, {counts['empty']:,} of them empty", markup=False)
        if counts["skipped"]:
            listed = ", ".join(f"{reason} {number:,}" for reason, number in counts["skipped"].items())
            self._console.print(f"skipped: {listed}; see {outputs.bad}", markup=False)


class VerificationLines:
    """Lines on standard error every ten seconds of a verification."""

    def __init__(self) -> None:
        self._console, self._shown = standard_error(), time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Print a line if the last line is ten seconds old."""
        if time.monotonic() - self._shown >= _LINE_SECONDS:
            self._shown = time.monotonic()
            self._console.print(f"verified {size(done)} of {size(total)} ({done / total:.0%})", markup=False)


def _rows(counts: Counts) -> str:
    text = f"{counts.documents:,} documents"
    num_skipped = sum(counts.skipped.values())
    if num_skipped:
        text += f", {num_skipped:,} rows skipped"
    return text


def present_inspection(statistics: dict[str, Any], console: Console) -> None:
    """Print statistics as tables."""
    unit = statistics["unit"]
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_row(
        "corpus", f"{statistics['path']} ({statistics['format']}, {size(statistics['file_bytes'])} on the disk)"
    )
    table.add_row("documents", f"{statistics['documents']:,}")
    tokens = "unknown; give --tokenizer"
    if statistics["tokens"] is not None:
        tokens = f"{statistics['tokens']:,}"
    table.add_row("tokens", tokens)
    table.add_row("bytes", size(statistics["bytes"]))
    if statistics["checksums"] is not None:
        checksums = "of every block; --verify compares all"
        if not statistics["checksums"]:
            checksums = "none, since an earlier release prepared it: damage may stay unnoticed; "
            checksums += "prepare it again with --restart"
        elif statistics["verified"]:
            checksums = "every byte is as it was written"
        table.add_row("checksums", checksums)
    lengths = ", ".join(f"{name} {value:,.0f}" for name, value in statistics["lengths"].items())
    table.add_row(f"lengths in {unit}", lengths)
    for reason, number in statistics["skipped"].items():
        table.add_row("bad rows", f"{reason}: {number:,}")
    console.print(table)
    if statistics["tokens"] is not None:
        packing = Table("packing", "rows", "waste", "cut documents", box=box.SIMPLE_HEAD)
        for way in ("concat", "best_fit"):
            row = (f"{statistics['rows'][way]:,}", f"{statistics['waste'][way]:.3%}", f"{statistics['cut'][way]:,}")
            packing.add_row(way, *row)
        console.print(f"rows of {statistics['seq_len']:,} targets:")
        console.print(packing)
    for sample in statistics["samples"]:
        console.print(f"document {sample['document']:,}: {sample['begins']!r}", soft_wrap=True)
