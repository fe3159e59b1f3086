"""`nxtrain data prepare` that is killed by SIGKILL at any moment goes on, and its files are those of one never killed.

The moments are drawn: a number of lines of the journal, and a delay that ends inside of a batch.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from tests.support.corpora import contents, documents, write_corpus, write_tokenizer

START = (
    "from nxtrain.data.arrow import preparation; preparation.BATCH_BYTES = 20_000;"
    "from nxtrain.__main__ import main; main()"
)
KILLS = 4


def start(folder: Path, source: Path, *options: str) -> subprocess.Popen[bytes]:
    """The command with small batches, writing into a folder."""
    words = ["data", "prepare", str(source), "--out", str(folder / "o.arrow"), "--on-bad", "skip", *options]
    return subprocess.Popen([sys.executable, "-c", START, *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("options", [(), ("--shard-bytes", "200kB"), ("--tokenizer",)], ids=" ".join)
def test_a_killed_preparation_goes_on_and_gives_the_same_bytes(options: tuple[str, ...], tmp_path: Path) -> None:
    if options == ("--tokenizer",):
        options = ("--tokenizer", str(write_tokenizer(tmp_path / "tokenizer")))
    source = write_corpus(tmp_path / "src", "a.jsonl.gz", [text * 12 for text in documents(7000)])
    (source.parent / "b.jsonl").write_bytes(b'{"text": 7}\n{"text": "last"}\n')
    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    done = start(folders[0], source.parent, *options)
    _, printed = done.communicate(timeout=120)
    assert done.returncode == 0, printed.decode()
    random, journal, kills = Random(" ".join(options[:1])), folders[1] / "o.arrow.partial" / "journal.jsonl", 0
    for _ in range(KILLS):
        process = start(folders[1], source.parent, *options)
        before = journal.read_bytes().count(b"\n") if journal.exists() else 0
        wanted = before + random.randint(1, 40)
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if journal.exists() and journal.read_bytes().count(b"\n") >= wanted:
                time.sleep(random.uniform(0, 0.004))
                break
            time.sleep(0.0005)
        process.kill()
        process.communicate()
        kills += process.returncode < 0 and journal.exists()
    assert kills >= 2, "the command was too fast to be killed"
    last = start(folders[1], source.parent, *options)
    _, printed = last.communicate(timeout=120)
    assert last.returncode == 0, printed.decode()
    assert contents(folders[1]) == contents(folders[0])
