"""Metadata operations of the data path, counted by strace: some for each file at the start, and none in a step.

A metadata server of a shared file system answers them for all ranks of all nodes, which pass the same step at once.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nxtrain.data.arrow import preparation, preparation_request
from tests.support.corpora import documents, prepare, write_corpus, write_tokenizer

STEPS, SEQ_LEN = 12, 24
MARK = "/no-such-folder/mark-"
WORKERS = 2
PER_FILE, PER_CORPUS, PER_FOLDER = 5, 2, 7
"""Operations of one opening of a corpus: for each of its files, and of the path of a file or of a folder of shards.

One of a file asks the open file for its time, by which a change in place is noticed.
"""

PROGRAM = f"""
import json, os, sys
from itertools import islice
from pathlib import Path
from nxtrain.config.schema import DataConfig
from nxtrain.data.arrow import streams
from nxtrain.data import BatchOrder, BatchShare, open_data
from nxtrain.data.workers import WorkerPolicy

streams._GROUP_BYTES, streams.WINDOW_ROWS = 100, 3  # every step reads documents

def mark(name):
    os.path.exists("{MARK}" + name)

folder, share = Path(sys.argv[1]), BatchShare(4, 2)
for name, keys in json.loads(sys.argv[2]).items():
    options = dict(seq_len={SEQ_LEN}, vocab_size=300, workdir=folder / "work", leader=True, barrier=lambda: None)
    for part in ("again", name):  # the first start imports packages, and prepares what a later one finds
        mark(f"start {{part}}")
        data = open_data(DataConfig(**keys), **options)
        workers = None
        if keys.get("workers"):
            workers = WorkerPolicy({WORKERS}, 0, 60.0)
        batches = data.source.batches(BatchOrder(share, 0, True, workers=workers)).prefetched(0)
        list(islice(batches, 8))
        mark(f"steps {{part}}")
        list(islice(batches, {STEPS}))
        mark("end")
        batches.close()
"""

CALL = re.compile(r"^\d+ +(?P<call>\w+)\((?P<rest>.*)")


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """Metadata operations of each phase: the call, and its arguments with the paths of descriptors."""
    strace = shutil.which("strace")
    if strace is None:  # a program of the system, which PyPI does not have; .ci/run installs it
        pytest.skip("strace is not installed: apt install strace")
    folder = tmp_path_factory.mktemp("corpora")
    source, tokenizer = write_corpus(folder, "a.jsonl", documents(60)), write_tokenizer(folder / "tokenizer")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "BATCH_BYTES", 500)
        patch.setattr(preparation_request, "MIN_SHARD_BYTES", 1)
        prepare(source, out=folder / "one.arrow")
        prepare(source, out=folder / "many.arrow", shard_bytes=2000)
    np.save(folder / "rows.npy", np.random.default_rng(0).integers(0, 300, (99, SEQ_LEN + 1)).astype(np.uint16))
    arrow: dict[str, Any] = {"source": "arrow", "tokenizer": str(tokenizer)}
    keys = {
        "one": {**arrow, "path": str(folder / "one.arrow")},
        "many": {**arrow, "path": str(folder / "many.arrow"), "packing": "best_fit"},
        "workers": {**arrow, "path": str(folder / "many.arrow"), "workers": WORKERS},
        "tokens": {"source": "tokens", "path": str(folder / "rows.npy")},
        "text": {"source": "text", "path": str(source), "tokenizer": str(tokenizer)},
    }
    trace = folder / "trace"
    argv = [
        strace,
        "-f",
        "-y",
        "-qq",
        "-e",
        "trace=%file,fstat,fstatfs,getdents64,ftruncate,fsync,preadv,preadv2",
        "-o",
        str(trace),
    ]
    done = subprocess.run(
        [*argv, sys.executable, "-c", PROGRAM, str(folder), json.dumps(keys)],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if "ptrace" in done.stderr and "not permitted" in done.stderr:  # a container without the right to trace
        pytest.skip(f"strace may not trace here: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return dict(_phases(trace.read_text(errors="replace").splitlines()))


def _phases(lines: list[str]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    name, result = "", list[tuple[str, str]]()
    for line in lines:
        if not (call := CALL.match(line)):
            continue
        if MARK in call["rest"]:
            yield name, result
            name, result = call["rest"].partition(MARK)[2].partition('"')[0], []
        else:
            is_open_file = re.match(r'\d+<[^>]*>, ""', call["rest"])
            result.append(("fstat" if is_open_file else call["call"], call["rest"]))


@pytest.mark.parametrize("source", ["one", "many", "workers", "tokens", "text"])
def test_no_step_looks_up_a_name(calls: dict[str, list[tuple[str, str]]], source: str) -> None:
    """Rows of ids are guarded against a change in place by the length and the time of the open file."""
    result = Counter(call for call, _ in calls[f"steps {source}"])
    reads = result.pop("preadv", 0) + result.pop("preadv2", 0)
    assert reads >= STEPS or source == "text", "rows of text come from a block in memory"
    if source in {"tokens", "text"}:
        assert 0 < result.pop("fstat") <= STEPS + 2, "batches ahead"
    assert not result, calls[f"steps {source}"][:5]


def of_corpus(calls: list[tuple[str, str]], name: str) -> int:
    return sum(name in rest for call, rest in calls if not call.startswith("preadv"))


def shards_of(calls: list[tuple[str, str]]) -> int:
    return len({result[0] for _, rest in calls if (result := re.search(r"many\.arrow/\d+\.arrow", rest))})


def test_a_start_needs_a_few_operations_for_each_file(calls: dict[str, list[tuple[str, str]]]) -> None:
    """The leader checks the corpus, every rank opens the corpus, the source counts documents, and opens the lanes."""
    number, openings = shards_of(calls["start many"]), 4
    assert number > 3
    assert 0 < of_corpus(calls["start one"], "one.arrow") <= openings * (PER_CORPUS + PER_FILE)
    assert of_corpus(calls["start many"], "many.arrow") <= openings * (PER_FOLDER + PER_FILE * number)
    # Lanes are opened once by this process, which passes them to nobody, and once by each worker.
    with_workers = openings + WORKERS
    assert of_corpus(calls["start workers"], "many.arrow") <= with_workers * (PER_FOLDER + PER_FILE * number)
