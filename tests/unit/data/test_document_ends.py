"""Conversations and texts in shared rows have the losses that transformers gives each of them alone and whole.

The end of text is also the end of a turn, or a word of the texts. A row therefore tells its documents by the marks of
its packer, and never by an id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.mesh import Mesh
from nxtrain.common.vocab import END_BIT, ID_MASK, IGNORE_INDEX
from nxtrain.data import stream_loader
from nxtrain.data.arrow import streams
from nxtrain.data.batch_source import Batches, BatchOrder
from nxtrain.data.dataset import Data
from nxtrain.data.loader import Batch, BatchShare, Loader, batch_of
from nxtrain.data.tokenization import TextTokenizer, load_tokenizer
from tests.support.conversations import (
    FAMILIES,
    VOCABULARY,
    Answered,
    Piece,
    answers_of,
    drawn_talks,
    pieces_of_stream,
    pieces_of_whole,
    write_family,
    write_talks,
)
from tests.support.corpora import prepare, write_corpus, write_tokenizer
from tests.support.drawn import one_in
from tests.support.models import hf_model, our_model, plan, weights_of
from tests.unit.data.conftest import open_at

SEQ_LEN = 192
SEEDS = range(5)
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WINDOW_ROWS", 4)


@dataclass(frozen=True)
class Models:
    """Our model and transformers', with equal weights."""

    ours: nn.Module
    theirs: nn.Module

    def loss(self, batch: Batch) -> float:
        """Our summed loss of a batch of one row."""
        starts = None if batch.starts is None else torch.from_numpy(batch.starts[0])
        with torch.no_grad():
            return float(self.ours.loss(torch.from_numpy(batch.inputs[0]), torch.from_numpy(batch.targets[0]), starts))  # type: ignore[operator]

    def losses(self, ids: Sequence[int]) -> Tensor:
        """Losses that transformers gives each token of a sequence but the first: (n - 1,)."""
        with torch.no_grad():
            logits = self.theirs(torch.tensor([ids])).logits[0, :-1]
        return nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    config = {"vocab_size": VOCABULARY, "max_position_embeddings": SEQ_LEN}
    resolved = plan("gqa2", model={"config": config}, train={"seq_len": SEQ_LEN})
    backend, weights = CpuBackend(), weights_of(resolved, std=0.2)
    yield Models(our_model(resolved, backend, Mesh(1, 0), weights), hf_model(resolved, weights=weights))
    backend.close()


def opened(folder: Path, **config: Any) -> Data:
    """Data of a run that evaluates its own corpus, too."""
    keys = {"doc_mask": True, "workers": 0, "shuffle": False, **config}
    return open_at(folder, seq_len=SEQ_LEN, vocab_size=VOCABULARY, validation_rows=100, **keys)


def loader_of(data: Data, *, doc_mask: bool, places: Sequence[tuple[int, ...]] = ()) -> Batches:
    """Batches of one row, in the order of the corpus."""
    return data.source.batches(BatchOrder(BatchShare(1, 1), 0, False, doc_mask=doc_mask, cursor={"places": places}))


def expected_loss(models: Models, pieces: Sequence[Piece], *, doc_mask: bool) -> tuple[float, int]:
    """Loss and number of targets that transformers gives the answers in a row.

    With masks, each document is read whole or as cut, alone. Without them, each token sees the row before itself.
    """
    ids = [token for piece in pieces for token in piece.document.ids[piece.first : piece.last]][: SEQ_LEN + 1]
    is_target = [index >= piece.document.begin for piece in pieces for index in range(piece.first, piece.last)]
    if not doc_mask:
        losses, chosen = models.losses(ids), torch.tensor(is_target[1 : SEQ_LEN + 1])
        return float(losses[chosen].sum()), int(chosen.sum())
    loss, num_targets = 0.0, 0
    for piece in pieces:
        document = piece.document.ids[piece.first : piece.last]
        begin = max(piece.document.begin - piece.first, 1)
        loss += float(models.losses(document)[begin - 1 :].sum()) if len(document) > 1 else 0.0
        num_targets += max(len(document) - begin, 0)
    return loss, num_targets


def compare(models: Models, batches: Sequence[Batch], rows: Sequence[list[Piece]], *, doc_mask: bool) -> None:
    for batch, pieces in zip(batches, rows, strict=True):
        loss, num_targets = expected_loss(models, pieces, doc_mask=doc_mask)
        assert batch.num_tokens == num_targets
        assert models.loss(batch) == pytest.approx(loss, rel=TOLERANCE, abs=TOLERANCE)


def read(loader: Batches, num_rows: int) -> list[Batch]:
    batches = loader.prefetched(0)
    try:
        return [next(batches) for _ in range(num_rows)]
    finally:
        batches.close()


def compare_road(models: Models, data: Data, documents: Sequence[Answered], packing: str) -> None:
    """Compare rows with and without masks; rows of `concat` pass the end of the corpus."""
    num_rows = 2 + 2 * sum(len(document.ids) for document in documents) // SEQ_LEN
    for doc_mask in (True, False):
        batches = read(loader_of(data, doc_mask=doc_mask), num_rows)
        if packing == "concat":
            result = [pieces_of_stream(documents, SEQ_LEN, row) for row in range(num_rows)]
        else:
            result = [pieces_of_whole(documents, batch.inputs[0, 0].tolist()) for batch in batches]
            assert {piece.document for row in result for piece in row} == set(documents)
        compare(models, batches, result, doc_mask=doc_mask)


class Conversations:
    """Drawn conversations of a family, prepared, and their answers in the tokens of transformers."""

    def __init__(self, folder: Path, name: str, seed: int) -> None:
        family, rng = FAMILIES[name], Random(seed)
        talks = drawn_talks(rng, 7)
        tokenizer = write_family(folder / "tokenizer", family)
        self.documents = [answer for talk in talks for answer in answers_of(tokenizer, family, talk)]
        self.path, self.tokenizer = folder / "talks.arrow", folder / "tokenizer"
        prepare(
            write_talks(folder / "talks.jsonl", talks),
            out=self.path,
            tokenizer=self.tokenizer,
            chat=True,
            field="messages",
        )
        self._folder = folder

    def data(self, packing: str, **config: Any) -> Data:
        return opened(self._folder / packing, source="arrow", path=str(self.path), packing=packing, **config)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("seed", one_in(5, SEEDS))
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_have_the_losses_of_whole_conversations(
    models: Models, tmp_path: Path, family: str, seed: int, packing: str
) -> None:
    talks = Conversations(tmp_path, family, seed)
    compare_road(models, talks.data(packing), talks.documents, packing)


@pytest.mark.parametrize("seed", SEEDS)
def test_held_out_answers_have_the_losses_of_whole_conversations(models: Models, tmp_path: Path, seed: int) -> None:
    talks = Conversations(tmp_path, "chatml", seed)
    validation = talks.data("best_fit", validation_path=str(talks.path)).validation
    assert validation is not None
    assert validation.num_rows > 1
    for doc_mask in (True, False):
        loader = Loader(validation, BatchShare(1, 1), seed=0, shuffle=False, doc_mask=doc_mask, past_end="pad")
        batches = [loader.batch(number) for number in range(validation.num_rows)]
        rows = [pieces_of_stream(talks.documents, SEQ_LEN, row) for row in range(validation.num_rows)]
        compare(models, batches, rows, doc_mask=doc_mask)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_after_a_resume_keep_the_ends_of_their_documents(tmp_path: Path, seed: int, packing: str) -> None:
    data = Conversations(tmp_path, "chatml", seed).data(packing)
    loader = loader_of(data, doc_mask=True)
    straight, batches = list[Batch](), loader.prefetched(0)
    for step in range(6):
        straight.append(next(batches))
        if step == seed % 5:
            places = loader.cursor()
    batches.close()
    resumed = read(loader_of(data, doc_mask=True, places=[places[0]]), 5 - seed % 5)
    for ours, expected in zip(resumed, straight[1 + seed % 5 :], strict=True):
        for item in ("inputs", "targets", "starts"):
            np.testing.assert_array_equal(getattr(ours, item), getattr(expected, item))


def inferring(rows: NDArray[np.int64], micro_batch: int, *, end_id: int, doc_mask: bool, seq_len: int = 0) -> Batch:
    """Batch whose documents end at each end of text: the defect that these tests are for."""
    is_end = (rows != IGNORE_INDEX) & (rows & ID_MASK == end_id)
    return batch_of(
        np.where(is_end, rows | END_BIT, rows), micro_batch, end_id=end_id, doc_mask=doc_mask, seq_len=seq_len
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_ends_that_are_inferred_from_ids_are_noticed(
    models: Models, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    talks = Conversations(tmp_path, "chatml", seed)
    monkeypatch.setattr(stream_loader, "batch_of", inferring)
    with pytest.raises(AssertionError):
        compare_road(models, talks.data("best_fit"), talks.documents, "best_fit")


WORD = "e"
"""End of text of the texts below, which is also a letter of them."""


def drawn_texts(rng: Random) -> list[str]:
    """Texts that hold the end of text in most words."""
    words = ("e", "eel", " tree", "snow ", "\u2603", "e e", "document")
    return ["".join(rng.choice(words) for _ in range(rng.choice((1, 4, 20, 70)))) for _ in range(20)]


@pytest.fixture(scope="module")
def lettered(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """A tokenizer whose end of text is a letter."""
    folder = tmp_path_factory.mktemp("lettered") / "tokenizer"
    write_tokenizer(folder, VOCABULARY)
    (folder / "tokenizer_config.json").write_text(f'{{"eos_token": "{WORD}"}}', encoding="utf-8")
    return load_tokenizer(folder, VOCABULARY)


@pytest.mark.parametrize("road", ["text", "arrow text", "arrow ids"])
@pytest.mark.parametrize("seed", SEEDS)
def test_texts_that_hold_the_end_of_text_have_their_losses_alone(
    models: Models, tmp_path: Path, lettered: TextTokenizer, seed: int, road: str
) -> None:
    texts = drawn_texts(Random(seed))
    documents = [Answered((*ids.tolist(), lettered.end_id), 0) for ids in lettered.encode(texts)]
    assert sum(document.ids[:-1].count(lettered.end_id) for document in documents) > len(documents)
    tokenizer = str(lettered.path.parent)
    if road == "text":
        path = write_corpus(tmp_path, "text", texts)
        data = opened(tmp_path / "work", source="text", path=str(path), tokenizer=tokenizer, validation_fraction=0.0)
    else:
        made_by = lettered.path if road == "arrow ids" else None
        prepare(write_corpus(tmp_path, "a.jsonl", texts), out=tmp_path / "o.arrow", tokenizer=made_by)
        data = opened(tmp_path / "work", source="arrow", path=str(tmp_path / "o.arrow"), tokenizer=tokenizer)
    num_rows = (sum(len(document.ids) for document in documents) - 1) // SEQ_LEN
    for doc_mask in (True, False):
        batches = read(loader_of(data, doc_mask=doc_mask), num_rows)
        rows = [pieces_of_stream(documents, SEQ_LEN, row) for row in range(num_rows)]
        compare(models, batches, rows, doc_mask=doc_mask)


@pytest.mark.parametrize("seed", SEEDS)
def test_in_token_files_each_end_of_text_ends_a_document(
    models: Models, tmp_path: Path, lettered: TextTokenizer, seed: int
) -> None:
    """Such a file says nothing else of its documents."""
    ids = [token for item in lettered.encode(drawn_texts(Random(seed))) for token in (*item.tolist(), lettered.end_id)]
    num_rows = (len(ids) - 1) // SEQ_LEN
    table = [ids[row * SEQ_LEN : (row + 1) * SEQ_LEN + 1] for row in range(num_rows)]
    np.save(tmp_path / "ids.npy", np.array(table, np.uint16))
    ends = [index + 1 for index, token in enumerate(ids) if token == lettered.end_id]
    documents = [Answered(tuple(ids[first:last]), 0) for first, last in zip([0, *ends], ends, strict=False)]
    data = opened(
        tmp_path / "work", source="tokens", path=str(tmp_path / "ids.npy"), tokenizer=str(lettered.path.parent)
    )
    rows = [pieces_of_stream(documents, SEQ_LEN, row) for row in range(num_rows)]
    compare(models, read(loader_of(data, doc_mask=True), num_rows), rows, doc_mask=True)
