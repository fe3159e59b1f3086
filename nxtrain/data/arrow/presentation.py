"""Terminal output of the `nxtrain data` commands: a progress bar or plain lines, and tables."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from nxtrain.common.process.console import standard_error
from nxtrain.common.process.progress import Progress
from nxtrain.common.process.signals import Signals
from nxtrain.common.text import size
from nxtrain.data.arrow.preparation import PreparationOutcome, Watcher
from nxtrain.data.arrow.work import Counts


class ConsoleWatcher(Watcher):
    """Context that displays the progress and the messages of a corpus preparation on standard error."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._console = standard_error()
        self._progress = Progress("preparing", console=self._console)

    def __enter__(self) -> ConsoleWatcher:
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.__exit__(kind, error, trace)

    def begin(self, what: str, num_bytes: int) -> None:
        """Print the sources."""
        self._console.print(f"sources: {what}, {size(num_bytes)}")
        self._progress.total = num_bytes

    def advance(self, num_bytes: int, counts: Counts) -> None:
        """Display the number of source bytes read, of documents, and of skipped rows."""
        label = f"{size(num_bytes)} of {size(self._progress.total)}, {counts.documents:,} documents"
        num_skipped = sum(counts.skipped.values())
        if num_skipped:
            label += f", {num_skipped:,} rows skipped"
        self._progress.show(num_bytes, label)

    def print_line(self, line: str) -> None:
        """Print a line before the preparation begins."""
        self._console.print(line)

    def bad(self, text: str) -> None:
        """Print a skipped row with its reason."""
        self._console.print(f"skipped: {text}")

    def asked_to_stop(self) -> str:
        """Name of the first stop signal; empty if there was none."""
        return self._signals.asked

    def end(self, outcome: PreparationOutcome) -> None:
        """Print the counts of the finished preparation."""
        counts, outputs = outcome.summary, outcome.outputs
        if not outcome.is_new:
            self._console.print(f"nothing to do: {outputs.out} holds these sources already")
        if not counts:
            return
        tokens = ""
        if counts["tokens"]:
            tokens = f", {counts['tokens']:,} tokens"
        line = f"{outputs.out}: {counts['documents']:,} documents, {size(counts['bytes'])} of text{tokens}"
        self._console.print(f"{line}; {counts['rows']:,} rows read, {counts['empty']:,} of them empty")
        if counts["skipped"]:
            listed = ", ".join(f"{reason} {number:,}" for reason, number in counts["skipped"].items())
            self._console.print(f"skipped: {listed}; see {outputs.bad}")


def present_inspection(statistics: dict[str, Any], console: Console) -> None:
    """Print the statistics of a corpus as tables."""
    unit = statistics["unit"]
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_row(
        "corpus", f"{statistics['path']} ({statistics['format']}, {size(statistics['file_bytes'])} on the disk)"
    )
    table.add_row("documents", f"{statistics['documents']:,}")
    if statistics["pairs"] is not None:
        table.add_row("pairs", f"{statistics['pairs']:,}")
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
        if "pair" in sample:
            console.print(f"pair {sample['pair']:,}: after ...{sample['prompt']!r}", soft_wrap=True)
            console.print(f"    chosen   {sample['chosen']!r}", soft_wrap=True)
            console.print(f"    rejected {sample['rejected']!r}", soft_wrap=True)
            continue
        console.print(f"document {sample['document']:,}: {sample['begins']!r}", soft_wrap=True)
