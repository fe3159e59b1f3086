"""Lines of a run that prepares its data: each piece of work that may take long is named before it begins."""

from __future__ import annotations

import functools
import random
import re
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from nxtrain.common.process.progress import Progress
from nxtrain.config.schema import DataConfig
from nxtrain.data.arrow import training
from nxtrain.data.arrow.training import prepare_corpora
from nxtrain.data.prepare import Prepared
from nxtrain.data.tokenization import train_bpe

VOCAB = 300


def write(folder: Path, seed: int) -> int:
    """Write drawn texts and return the number of their bytes."""
    draw = random.Random(seed)
    folder.mkdir()
    num_bytes = 0
    for number in range(draw.randint(1, 5)):
        text = " ".join(
            draw.choice(["def", "return", "na\u00efve", "x", "\u65e5\u672c"]) for _ in range(draw.randint(50, 400))
        )
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
        num_bytes += len(text.encode())
    return num_bytes


def prepared(folder: Path) -> Prepared:
    config = DataConfig(source="text", path=str(folder), validation_fraction=0.0)
    return prepare_corpora(config, 8, VOCAB, folder.parent / "work")


@pytest.mark.parametrize("seed", range(4))
def test_a_first_start_names_what_it_does_and_a_second_one_has_nothing_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    num_bytes = write(tmp_path / "text", seed)
    prepared(tmp_path / "text")
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        f"training a tokenizer of {VOCAB:,} entries on at most {num_bytes:,} bytes of text",
        f"tokenizing {num_bytes:,} bytes of {tmp_path / 'text'}",
    ]
    assert said.out == ""
    prepared(tmp_path / "text")
    assert capsys.readouterr() == ("", "")


def test_long_work_shows_its_share_and_its_time_in_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "text", 7)

    def slow(texts: Iterable[str], vocab_size: int, path: Path) -> None:
        train_bpe((time.sleep(0.15) or text for text in texts), vocab_size, path)  # type: ignore[func-returns-value]
        time.sleep(0.15)

    monkeypatch.setattr(training, "Progress", functools.partial(Progress, line_every_s=0.02))
    monkeypatch.setattr(training, "train_bpe", slow)
    prepared(tmp_path / "text")
    lines = capsys.readouterr().err.splitlines()
    shares = [line for line in lines if re.fullmatch(r"training a tokenizer: counting words: \d+%, .* left", line)]
    merges = [line for line in lines if re.fullmatch(r"training a tokenizer: merging words: [\d.]+ m?s so far", line)]
    assert merges
    assert shares or len([*(tmp_path / "text").iterdir()]) == 1
