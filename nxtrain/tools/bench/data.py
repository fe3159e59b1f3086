"""`nxtrain bench data`: speed of the loader, of tokenization and packing, and of the start on a large corpus.

The loader reads token ids in a file, drawn in random order, on one core. The reference is numpy's copy of as many
random rows out of the same file.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from nxtrain.common.process.progress import Progress
from nxtrain.config.schema import DataConfig
from nxtrain.data.dataset import open_data
from nxtrain.data.loader import BatchShare, Loader
from nxtrain.tools.bench import harness
from nxtrain.tools.bench.data_streams import measure_streams
from nxtrain.tools.bench.data_wait import MOST_WAITING

LOADER, NUMPY = "loader", "numpy"

VOCAB = 32000
BATCH = 32


def bench_data(sizes: Mapping[str, int], *, rounds: int, as_json: bool) -> None:
    """Measure the loader, tokenization and the start on a corpus, and print the results.

    Args:
        sizes: `mib` of token ids, two bytes each; `text_mib` to tokenize; `file_mib` of a corpus to open; `seq_len`.
    """
    seq_len = sizes["seq_len"]
    ids = summarize(measure(sizes["mib"], seq_len, rounds))
    streams = measure_streams(text_mib=sizes["text_mib"], file_mib=sizes["file_mib"], seq_len=seq_len, rounds=rounds)
    result = {"machine": harness.machine(), **sizes, "rounds": rounds, **ids, **streams}
    harness.present(result, lambda: _shown(result), as_json=as_json)


def measure(mib: int, seq_len: int, rounds: int) -> dict[str, list[float]]:
    """Tokens per CPU second of each side in every round."""
    num_rows = max(BATCH, mib * (1 << 20) // (2 * (seq_len + 1)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.npy"
        with Progress("writing random ids"):
            rows = np.random.default_rng(0).integers(0, VOCAB, (num_rows, seq_len + 1), dtype=np.uint16)
            np.save(file, rows)
            del rows
        loader = _loader(file, seq_len)
        ids = np.load(file, mmap_mode="r")
        draw = np.random.default_rng(1)
        steps = num_rows // BATCH

        def load() -> int:
            return sum(loader.batch(step).targets.size for step in range(steps))

        def copy() -> int:
            num_targets = 0
            for _ in range(steps):
                batch = ids[draw.integers(0, num_rows, BATCH)].astype(np.int64)
                num_targets += batch[:, 1:].size
            return num_targets

        sides = {LOADER: partial(_rate, load), NUMPY: partial(_rate, copy)}
        return harness.take_turns(sides, rounds, label="reading ids, ")


def _rate(act: Callable[[], int]) -> float:
    """Tokens per CPU second of one turn."""
    began = time.process_time()
    tokens = act()
    return tokens / (time.process_time() - began)


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
    """Medians over rounds, and the ratio of the loader to numpy inside each round."""
    rows = [harness.row(name, "tokens/s", rates) for name, rates in measured.items()]
    return {"rows": rows, "ratios": {NUMPY: harness.median_ratio(measured[LOADER], measured[NUMPY])}}


def _shown(result: Mapping[str, Any]) -> list[str | Table]:
    text = result["text"]
    start = result["start"]
    wait = result["wait"]
    ids_table = harness.table(
        f"{result['mib']} MiB of token ids, rows of {result['seq_len']}",
        ("", "million tokens per CPU second"),
        [(row["name"], f"{row['value'] / 1e6:.1f}") for row in result["rows"]],
        f"the loader reaches {result['ratios'][NUMPY]:.2f} of numpy's speed; medians over {result['rounds']} rounds",
    )
    rows = []
    for row in text["rows"]:
        name = row["name"]
        speeds = f"{row['value'] / 1e6:.2f}", f"{median(row['bare']) / 1e6:.2f}", f"{text['ratios'][name]:.2f}"
        rows.append((name, *speeds, f"{text['inside'][name]:.1%}"))
    text_table = harness.table(
        f"{result['text_mib']} MiB of text, {text['documents']:,} documents",
        ("", "million tokens per CPU second", "the bare tokenizer", "of it", "inside the tokenizer"),
        rows,
        "the bare tokenizer gets each text that a side tokenizes, right before or after the side",
    )
    shares = ", ".join(f"{share:.1%} with {name}" for name, share in wait["shares"].items())
    waits = [f"wait for data in steps at {wait['tokens_per_s']:,} tokens/s with {wait['workers']} workers: {shares}"]
    for name, rate_of in wait["kept"].items():
        rates = ", ".join(f"{rate:,.0f} with {workers}" for workers, rate in rate_of.items())
        waits.append(f"most tokens/s of {name} at a wait below {MOST_WAITING:.0%}, by workers: {rates}")
    opened = (
        f"a corpus of {start['mib']:,.0f} MiB, {start['documents']:,} documents, opens in a fresh process in "
        f"{start['wall_s']:.2f} s, {start['cpu_s']:.2f} CPU s and {start['rss_mib']:.0f} MiB"
    )
    return [ids_table, text_table, *waits, opened]
