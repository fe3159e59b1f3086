"""Measurements of corpora: tokenization and packing next to the bare tokenizer, waits, start on a large corpus.

The text is Python's standard library, the tokenizer a BPE that is trained on it. The CPU time of all of its threads
counts. The file of the start has holes in place of its documents, so that a disk need not hold them.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from nxtrain.common.process.progress import Progress
from nxtrain.data.arrow import ipc
from nxtrain.data.arrow.columns import TEXT_FIELD, schema_of, text_array
from nxtrain.data.arrow.preparation import BATCH_BYTES, PreparationRequest, Watcher, prepare_corpus
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.seal import Sealing
from nxtrain.data.arrow.streams import WINDOW_ROWS, CorpusLanes
from nxtrain.data.corpora import stdlib_texts
from nxtrain.data.tokenization import TextTokenizer, load_tokenizer, train_bpe
from nxtrain.tools.bench.data_turns import packing_turns, take_text_turns
from nxtrain.tools.bench.data_wait import measure_wait
from nxtrain.tools.bench.harness import BenchWorker

CONCAT = "concat"
BEST_FIT = "best_fit"
WORKER = "best_fit in a worker"

VOCAB = 4096

_TRAINED_BYTES = 2 << 20
_DOCUMENT_BYTES = 4096


def measure_text(mib: int, seq_len: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Tokens per CPU second of each way to pack, next to the bare tokenizer on the same documents.

    Args:
        seq_len: Targets in a row.
    """
    source, tokenizer = _write_corpus(mib << 20, seq_len, folder)
    corpus = PreparedCorpus(source.paths[0])
    texts = [corpus.text(number) for number in range(len(corpus))]
    num_tokens = sum(ids.size + 1 for ids in tokenizer.encode(texts))
    number = max(1, num_tokens // (WINDOW_ROWS * (seq_len + 1)))
    fitted = replace(source, packing="best_fit")
    sides = {
        CONCAT: packing_turns(source, number),
        BEST_FIT: packing_turns(fitted, number),
        WORKER: packing_turns(fitted, number, lambda name: None),
    }
    return {"documents": len(texts), "corpus_tokens": num_tokens, **take_text_turns(sides, rounds)}


def _write_corpus(num_bytes: int, seq_len: int, folder: Path) -> tuple[CorpusLanes, TextTokenizer]:
    """Prepare the documents of the standard library, and train a tokenizer on some of them."""
    texts = list(stdlib_texts(num_bytes))
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps({'text': text})}\n" for text in texts)
    prepare_corpus(PreparationRequest([folder / "text.jsonl"], folder / "text.arrow"), Watcher())
    sample, num_chars = list[str](), 0
    for text in texts:
        sample.append(text)
        num_chars += len(text)
        if num_chars > _TRAINED_BYTES:
            break
    train_bpe(sample, VOCAB, folder / "tokenizer.json")
    tokenizer = load_tokenizer(folder / "tokenizer.json", VOCAB)
    identity = PreparedCorpus(folder / "text.arrow").identity
    options = (tokenizer.path, tokenizer.end, VOCAB, 0.0)
    return CorpusLanes((folder / "text.arrow",), (identity,), None, *options, "concat", seq_len), tokenizer


def measure_start(mib: int, folder: Path) -> dict[str, float]:
    """Seconds and memory of a fresh process that opens a large corpus and reads a document at its end.

    Raises:
        BackendError: The process fails.
    """
    path = folder / "large.arrow"
    num_documents = write_sparse(path, mib << 20)
    began = time.perf_counter()
    with BenchWorker("data_streams", "opening", {"path": str(path)}, os.environ) as worker:
        measured = worker.turn()
        wall_s = time.perf_counter() - began
    return {"mib": path.stat().st_size / (1 << 20), "documents": num_documents, "wall_s": wall_s, **measured}


def write_sparse(path: Path, num_bytes: int) -> int:
    """Write a prepared corpus whose documents are holes of a sparse file, and return their number."""
    schema = schema_of(0, field=TEXT_FIELD, sources="sparse")
    array, _ = text_array([bytes(_DOCUMENT_BYTES)] * (BATCH_BYTES // _DOCUMENT_BYTES), [])
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


def turns(_: str, job: Mapping[str, Any]) -> dict[str, Callable[[], dict[str, float]]]:
    """Turn that opens a corpus and reads one document: CPU seconds and memory of this process."""

    def turn() -> dict[str, float]:
        corpus = PreparedCorpus(Path(job["path"]))
        assert len(corpus.content(len(corpus) - 1)) == _DOCUMENT_BYTES
        # The peak of getrusage includes that of the parent before the program was loaded.
        status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        peak = next(line for line in status if line.startswith("VmHWM:"))
        return {"cpu_s": time.process_time(), "rss_mib": int(peak.split()[1]) / 1024}

    return {"": turn}


def measure_streams(*, text_mib: int, file_mib: int, seq_len: int, rounds: int) -> Mapping[str, Any]:
    """Run all measurements in a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = measure_text(text_mib, seq_len, rounds, folder)
        wait = measure_wait(_corpora(folder, seq_len))
        with Progress(f"opening a corpus of {file_mib:,} MiB"):
            return {"text": text, "wait": wait, "start": measure_start(file_mib, folder)}


def _corpora(folder: Path, seq_len: int) -> dict[str, CorpusLanes]:
    tokenizer = load_tokenizer(folder / "tokenizer.json", VOCAB)
    prepare_corpus(
        PreparationRequest([folder / "text.jsonl"], folder / "ids.arrow", tokenizer=tokenizer.path), Watcher()
    )

    def lanes(name: str, of_text: Path | None) -> CorpusLanes:
        path = folder / name
        options = (of_text, tokenizer.end, VOCAB, 0.0)
        return CorpusLanes((path,), (PreparedCorpus(path).identity,), None, *options, "concat", seq_len)

    return {"text": lanes("text.arrow", tokenizer.path), "ids": lanes("ids.arrow", None)}
