"""`nxtrain bench data`: speed of the data loader, of tokenization with packing, and of opening a large corpus.

The loader reads rows of token ids from a file in random order, on one core. Its reference is numpy's copy of as many
random rows from the same file.

The text is Python's standard library. The tokenizer is a BPE trained on that text. The CPU time of all tokenizer
threads counts. The large corpus is a sparse file with holes in place of the documents, so it needs little disk space.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
from rich.table import Table

from nxtrain.common.hf_files import TOKENIZER
from nxtrain.common.process.progress import Progress
from nxtrain.config.schema import DataConfig
from nxtrain.data.arrow import ipc
from nxtrain.data.arrow.columns import TEXT_FIELD, schema_of, text_array
from nxtrain.data.arrow.preparation import BATCH_BYTES, Watcher, prepare_corpus
from nxtrain.data.arrow.preparation_request import PreparationRequest
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.seal import Sealing
from nxtrain.data.arrow.streams import WINDOW_ROWS, CorpusLanes
from nxtrain.data.corpora import stdlib_texts
from nxtrain.data.dataset import open_data
from nxtrain.data.loader import BatchShare, Loader
from nxtrain.data.tokenization import TextTokenizer, load_tokenizer, train_bpe
from nxtrain.tools.bench import harness
from nxtrain.tools.bench.data_turns import packing_turns, take_text_turns
from nxtrain.tools.bench.data_wait import MOST_WAITING, measure_wait

LOADER, NUMPY = "loader", "numpy"
VOCAB, TEXT_VOCAB = 32000, 4096  # vocabulary of the random ids, and of the tokenizer for text
BATCH = 32
TRAINED_CHARS = 2 << 20
DOCUMENT_BYTES = 4096


def bench_data(sizes: Mapping[str, int], *, rounds: int, as_json: bool) -> None:
    """Measure the data loader, tokenization, and the opening of a large corpus, and print the results.

    Args:
        sizes: `mib` of token ids, two bytes each; `text_mib` to tokenize; `file_mib` of a corpus to open; `seq_len`.
    """
    seq_len = sizes["seq_len"]
    rates = measure_ids(sizes["mib"], seq_len, rounds)
    result: dict[str, Any] = {"machine": harness.machine(), **sizes, "rounds": rounds}
    result["rows"] = [harness.row(name, "tokens/s", rates_of) for name, rates_of in rates.items()]
    result["ratios"] = {NUMPY: harness.median_ratio(rates[LOADER], rates[NUMPY])}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpora, tokenizer = prepare_text(sizes["text_mib"] << 20, seq_len, folder)
        result["text"] = measure_text(corpora["text"], tokenizer, rounds)
        result["wait"] = measure_wait(corpora)
        with Progress(f"opening a corpus of {sizes['file_mib']:,} MiB"):
            result["start"] = measure_start(sizes["file_mib"] << 20, folder / "large.arrow")
    harness.present(result, lambda: _shown(result), as_json=as_json)


def measure_ids(mib: int, seq_len: int, rounds: int) -> dict[str, list[float]]:
    """Tokens per CPU second of the loader and of numpy's copy, in every round."""
    num_rows = max(BATCH, mib * (1 << 20) // (2 * (seq_len + 1)))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.npy"
        with Progress("writing random ids"):
            rows = np.random.default_rng(0).integers(0, VOCAB, (num_rows, seq_len + 1), dtype=np.uint16)
            np.save(file, rows)
            del rows
        config = DataConfig(source="tokens", path=str(file))
        work = Path(folder) / "work"
        data = open_data(config, seq_len=seq_len, vocab_size=VOCAB, workdir=work, leader=True, barrier=lambda: None)
        share = BatchShare(global_batch=BATCH, micro_batch=BATCH, dp_rank=0, dp_size=1)
        loader = Loader(data.train, share, seed=0, shuffle=True)
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

        def rate(act: Callable[[], int]) -> float:
            began = time.process_time()
            tokens = act()
            return tokens / (time.process_time() - began)

        return harness.take_turns(
            {LOADER: partial(rate, load), NUMPY: partial(rate, copy)}, rounds, label="reading ids, "
        )


def prepare_text(num_bytes: int, seq_len: int, folder: Path) -> tuple[dict[str, CorpusLanes], TextTokenizer]:
    """Prepare the texts of Python's standard library as two corpora: one of text and one of token ids.

    The tokenizer is trained on a sample of the texts.
    """
    texts = list(stdlib_texts(num_bytes))
    jsonl, vocab = folder / "text.jsonl", folder / TOKENIZER
    with jsonl.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps({'text': text})}\n" for text in texts)
    sample = list[str]()
    num_chars = 0
    for text in texts:
        sample.append(text)
        num_chars += len(text)
        if num_chars > TRAINED_CHARS:
            break
    train_bpe(sample, TEXT_VOCAB, vocab)
    tokenizer = load_tokenizer(vocab, TEXT_VOCAB)
    corpora = {}
    # The corpus `text` is tokenized during training, the corpus `ids` in its preparation.
    for name, in_training, in_preparation in (("text", tokenizer.path, None), ("ids", None, tokenizer.path)):
        path = folder / f"{name}.arrow"
        prepare_corpus(PreparationRequest([jsonl], path, tokenizer=in_preparation), Watcher())
        options = (in_training, tokenizer.end, TEXT_VOCAB, 0.0)
        corpora[name] = CorpusLanes((path,), (PreparedCorpus(path).identity,), None, *options, "concat", seq_len)
    return corpora, tokenizer


def measure_text(source: CorpusLanes, tokenizer: TextTokenizer, rounds: int) -> dict[str, Any]:
    """Tokens per CPU second of each packing mode, compared with the bare tokenizer on the same documents."""
    corpus = PreparedCorpus(source.paths[0])
    texts = [corpus.text(number) for number in range(len(corpus))]
    num_tokens = sum(ids.size + 1 for ids in tokenizer.encode(texts))
    number = max(1, num_tokens // (WINDOW_ROWS * (source.seq_len + 1)))
    fitted = replace(source, packing="best_fit")
    sides = {
        "concat": packing_turns(source, number),
        "best_fit": packing_turns(fitted, number),
        "best_fit in a worker": packing_turns(fitted, number, lambda name: None),
    }
    return {"documents": len(texts), "corpus_tokens": num_tokens, **take_text_turns(sides, rounds)}


def measure_start(num_bytes: int, path: Path) -> dict[str, float]:
    """Seconds and memory of a fresh process that opens a large corpus and reads a document at its end."""
    num_documents = write_sparse(path, num_bytes)
    began = time.perf_counter()
    with harness.BenchWorker("data", "opening", {"path": str(path)}, os.environ) as worker:
        measured = worker.turn()
        wall_s = time.perf_counter() - began
    return {"mib": path.stat().st_size / (1 << 20), "documents": num_documents, "wall_s": wall_s, **measured}


def turns(_: str, job: Mapping[str, Any]) -> dict[str, Callable[[], dict[str, float]]]:
    """Make the function that measures opening a corpus and reading one document, in a worker process.

    The function returns the CPU seconds and the memory of that process.
    """

    def turn() -> dict[str, float]:
        corpus = PreparedCorpus(Path(job["path"]))
        assert len(corpus.content(len(corpus) - 1)) == DOCUMENT_BYTES
        # The peak of getrusage includes that of the parent before the program was loaded.
        status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        peak = next(line for line in status if line.startswith("VmHWM:"))
        return {"cpu_s": time.process_time(), "rss_mib": int(peak.split()[1]) / 1024}

    return {"": turn}


def write_sparse(path: Path, num_bytes: int) -> int:
    """Write a prepared corpus as a sparse file with holes for documents, and return the number of documents."""
    schema = schema_of(0, field=TEXT_FIELD, sources="sparse")
    array, _ = text_array([bytes(DOCUMENT_BYTES)] * (BATCH_BYTES // DOCUMENT_BYTES), [])
    batch = pa.record_batch([array], schema=schema)
    blocks = []
    sealing = Sealing()
    entries = b""
    with path.open("wb") as file:
        entries += sealing.add(memoryview(ipc.begin(schema)))
        file.write(ipc.begin(schema))
        for _ in range(max(1, num_bytes // BATCH_BYTES)):
            content, block = ipc.message(batch, file.tell())
            held = content.size - BATCH_BYTES  # the documents are the last buffer
            file.write(content.slice(0, held))
            file.truncate(file.tell() + BATCH_BYTES)
            file.seek(0, 2)
            blocks.append(block)
            entries += sealing.add_batch(memoryview(content), block.metadata)[0]
        entries += sealing.add(memoryview(ipc.END_OF_STREAM))
        footer = ipc.end(schema, blocks)
        file.write(ipc.END_OF_STREAM)
        covered = file.tell()
        file.write(entries + sealing.finish(covered, footer) + footer)
    return len(array) * len(blocks)


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
