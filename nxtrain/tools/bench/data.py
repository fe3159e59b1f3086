"""`nxtrain bench data`: speed of the loader, of tokenization and packing, and of the start on a large corpus.

The loader reads token ids in a file, drawn in random order, on one core. The floor is numpy's own copy of as many
random rows out of the same file. Other loaders are measured next to ours in the same rounds, where they are installed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from nxtrain.common.process.document import write_document
from nxtrain.common.process.progress import Progress
from nxtrain.config.schema import DataConfig
from nxtrain.data.dataset import open_data
from nxtrain.data.loader import BatchShare, Loader
from nxtrain.tools.bench.data_peers import Side, absent, ids_sides
from nxtrain.tools.bench.data_streams import measure_streams
from nxtrain.tools.bench.data_wait import MOST_WAITING
from nxtrain.tools.bench.turns import machine, machine_line, median_ratio

LOADER, NUMPY = "loader", "numpy"

VOCAB = 32000
BATCH = 32


def bench_data(sizes: Mapping[str, int], *, rounds: int, as_json: bool) -> None:
    """Measure and print.

    Args:
        sizes: `mib` of token ids, two bytes each; `text_mib` to tokenize; `file_mib` of a corpus to open; `seq_len`.
        rounds: Turns of each, after one that warms up.
        as_json: Print JSON instead of tables.
    """
    seq_len = sizes["seq_len"]
    ids = summarize(measure(sizes["mib"], seq_len, rounds))
    streams = measure_streams(text_mib=sizes["text_mib"], file_mib=sizes["file_mib"], seq_len=seq_len, rounds=rounds)
    result = {"machine": machine(), **sizes, "rounds": rounds, **ids, **streams, "absent": absent()}
    if as_json:
        write_document(result)
    else:
        _show(result)


def measure(mib: int, seq_len: int, rounds: int) -> dict[str, list[float]]:
    """Tokens per CPU second of each side in every round."""
    num_rows = max(BATCH, mib * (1 << 20) // (2 * (seq_len + 1)))
    with tempfile.TemporaryDirectory() as folder, Progress("writing random ids") as progress:
        file = Path(folder) / "rows.npy"
        rows = np.random.default_rng(0).integers(0, VOCAB, (num_rows, seq_len + 1), dtype=np.uint16)
        np.save(file, rows)
        peers = ids_sides(rows, Path(folder))
        del rows
        loader = _loader(file, seq_len)
        ids = np.load(file, mmap_mode="r")
        draw = np.random.default_rng(1)
        steps = num_rows // BATCH

        def load() -> int:
            return sum(loader.batch(step).targets.size for step in range(steps))

        def copy() -> int:
            batches = (ids[draw.integers(0, num_rows, BATCH)].astype(np.int64) for _ in range(steps))
            return sum(batch[:, 1:].size for batch in batches)

        sides: dict[str, Side] = {LOADER: load, NUMPY: copy, **peers}
        rates: dict[str, list[float]] = {name: [] for name in sides}
        progress.total = (rounds + 1) * len(sides)
        for done, (number, name) in enumerate(product(range(rounds + 1), sides)):
            progress.show(done, f"reading ids, round {number} of {rounds}: {name}")
            began = time.process_time()
            tokens = sides[name]()
            rates[name].append(tokens / (time.process_time() - began))
    return {name: turns[1:] for name, turns in rates.items()}


def _loader(file: Path, seq_len: int) -> Loader:
    data = open_data(
        DataConfig(source="tokens", path=str(file)),
        seq_len=seq_len,
        vocab_size=VOCAB,
        workdir=file.parent / "work",
        leader=True,
        barrier=lambda: None,
    )
    share = BatchShare(global_batch=BATCH, micro_batch=BATCH, dp_rank=0, dp_size=1)
    return Loader(data.train, share, seed=0, shuffle=True)


def summarize(measured: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians over rounds, and the ratios of the loader to the others inside each round."""
    return {
        "rows": [
            {"name": name, "value": median(rates), "unit": "tokens/s", "rounds": list(rates)}
            for name, rates in measured.items()
        ],
        "ratios": {name: median_ratio(measured[LOADER], measured[name]) for name in measured if name != LOADER},
    }


def _show(result: Mapping[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(machine_line(result["machine"]), markup=False)
    for name, way_out in result["absent"].items():
        console.print(f"without {name}, which is not installed: {way_out}", markup=False)
    table = Table(title=f"{result['mib']} MiB of token ids, rows of {result['seq_len']}", title_style="bold")
    table.add_column("")
    table.add_column("million tokens per CPU second", justify="right")
    for row in result["rows"]:
        table.add_row(row["name"], f"{row['value'] / 1e6:.1f}")
    table.caption = (
        f"the loader reaches {result['ratios'][NUMPY]:.2f} of numpy's speed; medians over {result['rounds']} rounds"
    )
    console.print(table)
    text = result["text"]
    start = result["start"]
    wait = result["wait"]
    table = Table(title=f"{result['text_mib']} MiB of text, {text['documents']:,} documents", title_style="bold")
    table.add_column("")
    for name in ("million tokens per CPU second", "the bare tokenizer", "of it", "inside the tokenizer"):
        table.add_column(name, justify="right")
    for row in text["rows"]:
        name = row["name"]
        speeds = f"{row['value'] / 1e6:.2f}", f"{median(row['bare']) / 1e6:.2f}", f"{text['ratios'][name]:.2f}"
        table.add_row(name, *speeds, f"{text['inside'][name]:.1%}")
    table.caption = "the bare tokenizer gets each text that a side tokenizes, right before or behind the side"
    console.print(table)
    listed = ", ".join(f"{share:.1%} with {name}" for name, share in wait["shares"].items())
    console.print(
        f"wait for data in steps at {wait['tokens_per_s']:,} tokens/s with {wait['workers']} workers: {listed}"
    )
    for name, rate_of in wait["kept"].items():
        rates = ", ".join(f"{rate:,.0f} with {workers}" for workers, rate in rate_of.items())
        console.print(f"most tokens/s of {name} at a wait below {MOST_WAITING:.0%}, by workers: {rates}")
    console.print(
        f"a corpus of {start['mib']:,.0f} MiB, {start['documents']:,} documents, opens in a fresh process in "
        f"{start['wall_s']:.2f} s, {start['cpu_s']:.2f} CPU s and {start['rss_mib']:.0f} MiB"
    )
