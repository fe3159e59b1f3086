"""From a corpus to rows: nothing lost, nothing twice, split by document, prepared once, and safe with many ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nxtrain.common.errors import DataError, LostPeerError
from nxtrain.common.vocab import ID_MASK
from nxtrain.config.schema import DataConfig
from nxtrain.data import Data, Samples, open_data
from nxtrain.data.arrow import rows, training
from nxtrain.data.tokenization import train_bpe
from tests.support.corpora import prepare
from tests.support.corpora import texts_of as texts_of_corpus
from tests.unit.data.conftest import OpenAlone, open_at


def all_rows(samples: Samples) -> NDArray[np.int64]:
    """Ids of the rows, without their marks."""
    return samples.rows(np.arange(samples.num_rows)) & ID_MASK


def stream_of(samples: Samples) -> list[int]:
    rows = all_rows(samples)
    return [*rows[:, :-1].ravel().tolist(), int(rows[-1, -1])]


def texts_of(data: Data, samples: Samples) -> list[str]:
    """Documents of a stream, decoded; one that the last row cuts is left out."""
    assert data.tokenizer is not None
    tokenizer = Tokenizer.from_file(str(data.tokenizer))
    text = tokenizer.decode(stream_of(samples), skip_special_tokens=False)
    return text.split("<|endoftext|>")[:-1]


def test_stream_holds_every_document_in_order_with_its_end(folder_of_text: Path, open_alone: OpenAlone) -> None:
    data = open_alone(source="text", path=str(folder_of_text), seq_len=1)
    assert texts_of(data, data.train) == [path.read_text() for path in sorted(folder_of_text.iterdir())]


def test_empty_tiny_and_huge_documents(tmp_path: Path, open_alone: OpenAlone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one is tokenized in several groups."""
    monkeypatch.setattr(training, "_GROUP_BYTES", 120)
    huge = "".join(f"line {i} of a long document\n" for i in range(20_000)) + "x" * 333
    folder = tmp_path / "text"
    folder.mkdir()
    for name, text in (("0", ""), ("1", "a"), ("2", huge), ("3", "\n"), ("4", "b")):
        (folder / name).write_text(text)
    data = open_alone(source="text", path=str(folder), seq_len=1)
    assert texts_of(data, data.train) == ["a", huge, "b"]
    prepare(folder, out=tmp_path / "o.arrow")
    assert texts_of_corpus(tmp_path / "o.arrow") == ["a", huge, "b"], "as `data prepare` has it"


def test_a_file_ends_once_but_where_a_section_is_held_out(tmp_path: Path, open_alone: OpenAlone) -> None:
    text = "".join(f"{number} bottles of beer on the wall\n" for number in range(16_000))
    (tmp_path / "song.txt").write_text(text)
    data = open_alone(source="text", path=str(tmp_path / "song.txt"), seq_len=1, validation_fraction=0.3)
    assert data.validation is not None
    parts = [*texts_of(data, data.train), *texts_of(data, data.validation)]
    parts.sort(key=text.index)
    assert "".join(parts) == text
    assert 0.3 <= data.validation.num_rows / (data.train.num_rows + data.validation.num_rows) < 0.45
    assert len(parts) < -(-len(text) // rows.SECTION_BYTES), "sections on one side are one document"


def test_split_is_by_document_and_complete(folder_of_text: Path, open_alone: OpenAlone) -> None:
    data = open_alone(source="text", path=str(folder_of_text), seq_len=1, validation_fraction=0.25)
    assert data.validation is not None
    train, validation = texts_of(data, data.train), texts_of(data, data.validation)
    assert sorted(train + validation) == sorted(path.read_text() for path in folder_of_text.iterdir())
    share = sum(map(len, validation)) / sum(map(len, train + validation))
    # Documents are taken until they hold the fraction, and each is 1/60 of the text.
    assert 0.25 <= share < 0.25 + 1.2 / 60


def test_the_tokenizer_learns_from_a_sample_of_what_is_trained_on(
    folder_of_text: Path, open_alone: OpenAlone, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = list[str]()

    def noted(texts: Iterable[str], vocab_size: int, path: Path) -> None:
        learned.extend(texts)
        train_bpe(learned, vocab_size, path)

    monkeypatch.setattr(training, "train_bpe", noted)
    keys = {"source": "text", "path": str(folder_of_text), "seq_len": 1, "validation_fraction": 0.2}
    data = open_alone(**keys)
    assert sorted(learned) == sorted(texts_of(data, data.train))
    monkeypatch.setattr(training, "_TOKENIZER_BYTES", 2000)
    learned.clear()
    sampled = open_alone(**keys, vocab_size=290)
    assert 2000 <= sum(map(len, learned)) < 3000
    assert set(learned) < set(texts_of(sampled, sampled.train))


def test_equal_documents_are_on_one_side(tmp_path: Path, open_alone: OpenAlone) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("the same text " * 20)
        (tmp_path / f"other-{number}.txt").write_text(f"another text {number} " * 20)
    for fraction in (0.1, 0.2, 0.3, 0.4):
        keys = {"source": "text", "path": str(tmp_path / "*.txt"), "seq_len": 1}
        data = open_alone(**keys, validation_fraction=fraction)
        assert data.validation is not None
        held_out = texts_of(data, data.validation)
        assert held_out.count("the same text " * 20) in {0, 10}
        assert len(held_out) >= 20 * fraction


def test_second_start_reuses_the_files_and_gives_equal_rows(
    folder_of_text: Path, open_alone: OpenAlone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"source": "text", "path": str(folder_of_text), "validation_fraction": 0.2}
    first = open_alone(**keys)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "work").iterdir() if "prepared" not in path.name}
    monkeypatch.setattr(training, "train_bpe", None)
    monkeypatch.setattr(training, "write_stream", None)
    second = open_alone(**keys)
    assert second.fingerprint == first.fingerprint
    assert {path: path.stat().st_mtime_ns for path in before} == before
    np.testing.assert_array_equal(all_rows(second.train), all_rows(first.train))


def test_preparing_again_from_nothing_is_bitwise_equal(folder_of_text: Path, tmp_path: Path) -> None:
    contents = []
    for name in ("one", "two"):
        workdir = tmp_path / name
        open_at(workdir, source="text", path=str(folder_of_text), validation_fraction=0.2)
        contents.append({p.name: p.read_bytes() for p in workdir.iterdir() if not p.name.startswith("prepared")})
    assert contents[0] == contents[1]
    assert len(contents[0]) == 7, "a tokenizer, and a corpus and two streams with their summaries"


def test_changed_text_changes_the_fingerprint(folder_of_text: Path, open_alone: OpenAlone) -> None:
    keys = {"source": "text", "path": str(folder_of_text)}
    first = open_alone(**keys)
    (folder_of_text / "00.txt").write_text("something else")
    second = open_alone(**keys)
    assert second.fingerprint != first.fingerprint
    assert texts_of(second, second.train)[0] == "something else"


def test_given_tokenizer_is_used(folder_of_text: Path, open_alone: OpenAlone, tmp_path: Path) -> None:
    trained = open_alone(source="text", path=str(folder_of_text)).tokenizer
    assert trained is not None
    own = tmp_path / "own"
    own.mkdir()
    trained.rename(own / "tokenizer.json")
    data = open_alone(source="text", path=str(folder_of_text), tokenizer=str(own), vocab_size=999)
    assert data.tokenizer == own / "tokenizer.json"
    assert all_rows(data.train).max() < 300
    (folder_of_text / "00.txt").write_text("something else")
    changed = open_alone(source="text", path=str(folder_of_text), tokenizer=str(own), vocab_size=999)
    assert texts_of(changed, changed.train)[0] == "something else"


def test_corpus_without_text_says_what_was_skipped(tmp_path: Path, open_alone: OpenAlone) -> None:
    (tmp_path / "picture").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"picture: the sources hold no document.*\n.*picture, row 1: binary"):
        open_alone(source="text", path=str(tmp_path / "picture"))


def test_too_little_text_names_the_figures(tmp_path: Path, open_alone: OpenAlone) -> None:
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(DataError, match=r"leaves for training \d tokens, less than one row of .* 9; add text"):
        open_alone(source="text", path=str(tmp_path / "short.txt"))
    (tmp_path / "short.txt").write_text("x y z " * 100)
    with pytest.raises(DataError, match=r"leaves for training 0 tokens"):
        open_alone(source="text", path=str(tmp_path / "short.txt"), validation_fraction=0.1)


def test_too_small_a_split_says_so(folder_of_text: Path, open_alone: OpenAlone) -> None:
    with pytest.raises(
        DataError, match=r"holds out with data\.validation_fraction=0\.001 \d+ tokens.*raise the fraction"
    ):
        open_alone(source="text", path=str(folder_of_text), seq_len=1000, validation_fraction=0.001)


def open_on_ranks(config: DataConfig, workdir: Path, num_ranks: int) -> list[Data | BaseException]:
    """Open with rank 0 as leader; a rank that fails leaves the others waiting for at most 20 s."""
    barrier = threading.Barrier(num_ranks, timeout=60)
    outcomes: list[Data | BaseException] = [SystemExit()] * num_ranks

    def run(rank: int) -> None:
        try:
            outcomes[rank] = open_data(
                config,
                seq_len=8,
                vocab_size=300,
                workdir=workdir,
                leader=rank == 0,
                barrier=lambda: void(barrier.wait()),
            )
        except BaseException as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def void(_: object) -> None:
    pass


def test_followers_map_what_the_leader_prepared(folder_of_text: Path, tmp_path: Path) -> None:
    config = DataConfig(source="text", path=str(folder_of_text), validation_fraction=0.2)
    first, *others = open_on_ranks(config, tmp_path / "work", 3)
    assert isinstance(first, Data)
    for other in others:
        assert isinstance(other, Data)
        assert (other.tokenizer, other.fingerprint) == (first.tokenizer, first.fingerprint)
        np.testing.assert_array_equal(all_rows(other.train), all_rows(first.train))


def test_when_the_leader_fails_no_rank_waits_or_takes_old_files(folder_of_text: Path, tmp_path: Path) -> None:
    config = DataConfig(source="text", path=str(folder_of_text))
    assert all(isinstance(outcome, Data) for outcome in open_on_ranks(config, tmp_path / "work", 2))
    (folder_of_text / "00.txt").write_bytes(b"\xff")
    leader, follower = open_on_ranks(config, tmp_path / "work", 2)
    assert isinstance(leader, DataError)
    assert "00.txt, row 1: invalid UTF-8: byte 0 is 0xff" in str(leader)
    assert isinstance(follower, LostPeerError)
    assert "the rank that prepares the data failed" in str(follower)
