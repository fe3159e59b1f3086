"""`nxtrain data prepare` and `inspect` as processes: exit codes, messages, streams, and bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import forked
from tests.support.corpora import documents, json_lines, write_corpus, write_tokenizer


def run(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    argv = ["data", *map(str, words)]
    return subprocess.CompletedProcess(argv, *forked(folder, *argv, environ={"COLUMNS": "200"}))


def test_a_corpus_is_prepared_recognised_and_inspected(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    source = write_corpus(tmp_path / "src", "a.jsonl.zst", documents(60))
    out = tmp_path / "o.arrow"
    done = run(tmp_path, "prepare", source, "--out", out, "--tokenizer", tokenizer)
    assert (done.returncode, done.stdout) == (0, "")
    assert "sources: 1 JSON Lines (zstd)" in done.stderr
    assert f"{out}: 60 documents" in done.stderr
    again = run(tmp_path, "prepare", source, "--out", out, "--tokenizer", tokenizer)
    assert (again.returncode, "nothing to do" in again.stderr) == (0, True)
    other = run(tmp_path, "prepare", source, "--out", out)
    assert (other.returncode, "--restart" in other.stderr, "Traceback" in other.stderr) == (3, True, False)
    result = run(tmp_path, "inspect", out, "--json", "--seq-len", 32)
    assert (result.returncode, result.stderr) == (0, "")
    content = json.loads(result.stdout)
    assert content.keys() >= {"documents", "tokens", "bytes", "lengths", "waste"}
    assert content["lengths"].keys() >= {"min", "median", "p99", "max"}
    assert content["waste"].keys() == {"concat", "best_fit"}
    shown = run(tmp_path, "inspect", out, "--tokenizer", tokenizer)
    assert (shown.returncode, "best_fit" in shown.stdout, "document 0" in shown.stdout) == (0, True, True)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("prepare", "bad.jsonl", "--out", "o.arrow"), 3, "bad.jsonl, row 2: wrong type"),
        (("prepare", "none.bin", "--out", "o.arrow"), 3, "unknown format"),
        (("prepare", "absent", "--out", "o.arrow"), 2, "absent does not exist"),
        (("prepare", "bad.jsonl", "--out", "o.npy"), 2, ".arrow"),
        (("prepare", "bad.jsonl", "--out", "o.arrow", "--shard-bytes", "many"), 2, "is not a size"),
        (("prepare", "bad.jsonl", "--out", "s3://bucket/o.arrow"), 2, "add --upload s3://bucket"),
        (("prepare", "bad.jsonl", "--out", "o.arrow", "--upload", "bucket"), 2, "is not an address in object storage"),
        (("inspect", "absent"), 2, "absent does not exist"),
        (("inspect", "none.bin"), 3, "unknown format"),
    ],
)
def test_a_mistake_has_its_exit_code_and_no_traceback(
    words: tuple[str, ...], code: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "one"}\n{"text": 2}\n')
    (tmp_path / "none.bin").write_bytes(b"\0\1")
    done = run(tmp_path, *words)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert "error: " in done.stderr or "Invalid value for '--shard-bytes'" in done.stderr
    assert message in " ".join(done.stderr.split())


def test_an_inspection_of_damaged_or_empty_files_ends_with_its_exit_code(tmp_path: Path) -> None:
    source, out = write_corpus(tmp_path / "src", "a.jsonl", documents(60)), tmp_path / "o.arrow"
    assert run(tmp_path, "prepare", source, "--out", out).returncode == 0
    verified = run(tmp_path, "inspect", out, "--verify")
    assert (verified.returncode, "every byte is as it was written" in verified.stdout) == (0, True)
    content = out.read_bytes()
    out.write_bytes(content.replace(b"document 7\n", b"document 9\n"))
    damaged = run(tmp_path, "inspect", out, "--verify")
    assert (damaged.returncode, damaged.stdout) == (3, "")
    assert "documents 0 to 59, are not what was written" in " ".join(damaged.stderr.split())
    out.write_bytes(content[:-100])
    (tmp_path / "empty.jsonl").write_text('{"text": " "}\n{"other": 3}\n')
    cases = {out: "truncated or damaged", tmp_path / "empty.jsonl": "holds no document (missing field 1)"}
    for path, message in cases.items():
        for words in ((), ("--json",)):
            done = run(tmp_path, "inspect", path, *words)
            assert (done.returncode, "Traceback" in done.stderr) == (3, False)
            assert message in " ".join(done.stderr.split())
        assert json.loads(done.stdout)["documents"] == 0
    not_prepared = run(tmp_path, "inspect", source, "--verify")
    assert (not_prepared.returncode, "is not an Arrow file" in not_prepared.stderr) == (3, True)


def test_skipped_rows_are_shown_and_listed(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(json_lines(["one", *range(9), "two"]))
    done = run(tmp_path, "prepare", source, "--out", tmp_path / "o.arrow", "--on-bad", "skip")
    assert done.returncode == 0
    assert done.stderr.count("skipped: ") == 6
    assert f"skipped: wrong type 9; see {tmp_path / 'o.bad.jsonl'}" in done.stderr
    assert len((tmp_path / "o.bad.jsonl").read_text().splitlines()) == 9


PEAK = """
import sys, threading, time
from pathlib import Path
from nxtrain.data.arrow.inspection import inspect_corpus
from nxtrain.data.arrow.preparation import Watcher, prepare_corpus
from nxtrain.data.arrow.preparation_request import PreparationRequest
import pyarrow.parquet, pyarrow as pa
command, source, out = sys.argv[1], *map(Path, sys.argv[2:])
def held():
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["RssAnon"].split()[0])  # mapped pages of files can be dropped at any time
before, peak, ended = held(), 0, threading.Event()
def watch():
    global peak
    while not ended.wait(0.002):
        peak = max(peak, held())
watcher = threading.Thread(target=watch)
watcher.start()
if command == "prepare":
    prepare_corpus(PreparationRequest([source], out), Watcher())
else:
    inspect_corpus(out, seq_len=2048)
ended.set()
watcher.join()
print(peak - before)
"""

BOUND_MIB = 80


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", pytest.param("a.jsonl", marks=pytest.mark.slow)])
def test_memory_is_bounded_for_a_source_several_times_larger(name: str, tmp_path: Path) -> None:
    line = f"{'some words of a document ' * 160}\n"
    source = write_corpus(tmp_path / "src", name, [f"{number} {line}" for number in range(75_000)], 1000)
    peaks = {}
    for command in ("prepare", "inspect"):
        argv = [sys.executable, "-c", PEAK, command, str(source), str(tmp_path / "o.arrow")]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
        peaks[command] = int(done.stdout) / 1024
    size = (tmp_path / "o.arrow").stat().st_size >> 20
    assert size > 3.5 * BOUND_MIB
    assert 1 < peaks["prepare"] < BOUND_MIB, peaks
    assert 1 < peaks["inspect"] < BOUND_MIB, peaks
    (tmp_path / "o.arrow").unlink()
    source.unlink()
