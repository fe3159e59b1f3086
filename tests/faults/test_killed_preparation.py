"""`nxtrain data prepare` that is killed at any moment goes on, and its files are those of one never killed."""

from __future__ import annotations

import signal
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from random import Random

import pytest

from nxtrain.data.arrow import preparation
from tests.support import commands
from tests.support.corpora import contents, documents, write_corpus, write_tokenizer

KILLS = 3


def make_small_batches() -> None:
    """Let this process write its journal often."""
    preparation.BATCH_BYTES = 20_000


def start(folder: Path, source: Path, *options: str) -> ForkServerProcess:
    """The command with small batches, writing into a folder beside that of its output."""
    words = ("data", "prepare", source, "--out", folder / "o.arrow", "--on-bad", "skip", *options)
    return commands.start(folder.parent, *words, first=make_small_batches)


def finish(folder: Path, source: Path, *options: str) -> None:
    """Let the command come to its end."""
    done = start(folder, source, *options)
    done.join(120)
    assert done.exitcode == 0, (folder.parent / commands.OUTPUT).read_text(encoding="utf-8")


@pytest.mark.parametrize("options", [(), ("--shard-bytes", "200kB"), ("--tokenizer",)], ids=" ".join)
def test_a_killed_preparation_goes_on_and_gives_the_same_bytes(options: tuple[str, ...], tmp_path: Path) -> None:
    if options == ("--tokenizer",):
        options = ("--tokenizer", str(write_tokenizer(tmp_path / "tokenizer")))
    source = write_corpus(tmp_path / "src", "a.jsonl.gz", [text * 12 for text in documents(5000)])
    (source.parent / "b.jsonl").write_bytes(b'{"text": 7}\n{"text": "last"}\n')
    folders = [tmp_path / "whole", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    finish(folders[0], source.parent, *options)
    random, journal, kills = Random(" ".join(options[:1])), folders[1] / "o.arrow.partial" / "journal.jsonl", 0
    for _ in range(KILLS):
        process = start(folders[1], source.parent, *options)
        before = journal.read_bytes().count(b"\n") if journal.exists() else 0
        wanted = before + random.randint(1, 40)
        deadline = time.monotonic() + 60
        while process.is_alive() and time.monotonic() < deadline:
            if journal.exists() and journal.read_bytes().count(b"\n") >= wanted:
                time.sleep(random.uniform(0, 0.004))
                break
            time.sleep(0.0005)
        process.kill()
        process.join()
        kills += process.exitcode == -signal.SIGKILL and journal.exists()
    assert kills >= 2, "the command was too fast to be killed"
    finish(folders[1], source.parent, *options)
    assert contents(folders[1]) == contents(folders[0])
