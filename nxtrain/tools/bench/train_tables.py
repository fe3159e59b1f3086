"""Tables of `nxtrain bench train` for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from rich.console import Console
from rich.table import Table

from nxtrain.tools.bench.breakdown import KINDS
from nxtrain.tools.bench.turns import machine_line

CLOCKS = {"cpu": "CPU time", "wall": "wall time", "device": "the device's clock"}


def show(result: Mapping[str, Any]) -> None:
    """Print speeds, ratios and the parts of nxtrain's own steps."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(machine_line(result["machine"]), markup=False)
    for name, reason in result["left_out"].items():
        console.print(f"left out {name}: {reason}", markup=False)
    notes = chain.from_iterable(row.get("notes", ()) for row in result["rows"])
    for note in dict.fromkeys(notes):
        console.print(note, markup=False)
    console.print(_speeds(result))
    peers = [row["name"] for row in result["rows"] if "mfu" in row and row["name"] not in result["ratios_of"]]
    if peers:
        console.print(_ratios(result, peers))
    for name, parts in result["breakdown"].items():
        console.print(_parts(name, parts))


def _speeds(result: Mapping[str, Any]) -> Table:
    table = Table(title=f"tokens/s, {result['precision']}, {result['threads']} threads", title_style="bold")
    table.add_column("candidate", overflow="fold")
    for clock in result["rows"][0]["by_clock"]:
        table.add_column(CLOCKS[clock], justify="right")
    for head in ("MFU", "compile s", "loss"):
        table.add_column(head, justify="right")
    for row in result["rows"]:
        if "mfu" not in row:
            continue
        speeds = [f"{speed['value']:.0f}" for speed in row["by_clock"].values()]
        compiled = f"{row['compile_s']:.1f}" if "compile_s" in row else ""
        mfu = f"{row['mfu']:.1%}"
        if row["mfu_of_maker"] is not None:
            mfu += f" ({row['mfu_of_maker']:.1%} of the maker's)"
        table.add_row(row["text"], *speeds, mfu, compiled, f"{row['loss']:.3f}")
    table.caption = (
        f"MFU of the GEMM peak, {result['peak_flops'] / 1e9:.0f} GFLOP/s in the same rounds, by "
        f"{CLOCKS[result['clock']]}: {result['mfu_formula']}; medians over {result['rounds']} rounds"
    )
    return table


def _ratios(result: Mapping[str, Any], peers: Sequence[str]) -> Table:
    table = Table(title=f"ratios of {CLOCKS[result['clock']]}", title_style="bold")
    table.add_column("over")
    for ours in result["ratios_of"]:
        table.add_column(ours, justify="right")
    for peer in peers:
        table.add_row(peer, *(_cell(ratios[peer]) for ratios in result["ratios_of"].values()))
    table.caption = "medians of the ratios inside each round, and their range"
    return table


def _cell(ratio: Mapping[str, Any]) -> str:
    return f"{ratio['value']:.2f}  ({min(ratio['rounds']):.2f} to {max(ratio['rounds']):.2f})"


def _parts(name: str, parts: Mapping[str, Any]) -> Table:
    table = Table(title=f"one step of {name}, profiled", title_style="bold")
    table.add_column("kind")
    for head in ("ms", "share", "operations"):
        table.add_column(head, justify="right")
    table.add_column("content")
    for kind, part in parts["kinds"].items():
        table.add_row(kind, f"{1e3 * part['s']:.1f}", f"{part['share']:.1%}", f"{part['calls']:.0f}", KINDS[kind])
    table.add_row("sum", f"{1e3 * parts['sum_s']:.1f}", f"{parts['sum_s'] / parts['step_s']:.1%} of the step", "", "")
    table.caption = (
        f"wall time; the profiled step took {1e3 * parts['step_s']:.1f} ms, "
        f"and the median of the others {1e3 * parts['unprofiled_step_s']:.1f} ms"
    )
    return table
