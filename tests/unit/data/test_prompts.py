"""Prompts: their tokens are inputs and no targets, in every format, through every packing, and in evaluation."""

from __future__ import annotations

import json
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxtrain.common.errors import ConfigError, DataError
from nxtrain.common.vocab import ID_MASK, IGNORE_INDEX, PROMPT_BIT
from nxtrain.data.arrow import streams
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.streams import BestFitLane, ConcatLane, Documents, is_held_out, open_lane
from nxtrain.data.held_out import target_counts
from nxtrain.data.loader import BatchShare, Loader, batch_of
from nxtrain.data.stream_loader import LaneOrder
from nxtrain.data.tokenization import TextTokenizer, load_tokenizer
from nxtrain.train.results import Summary
from tests.support.corpora import drop_checksums, prepare, write_file, write_tokenizer
from tests.unit.data.conftest import open_at

VOCABULARY, SEQ_LEN = 300, 24
ROWS = [(f"question {n} \u2603 " * (n % 3), f"answer {n}\n" * (1 + n % 4)) for n in range(23)]
Pieces = list[tuple[list[int], list[int]]]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WINDOW_ROWS", 3)
    monkeypatch.setattr(streams, "_GROUP_BYTES", 100)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "t", VOCABULARY), VOCABULARY)


def write(folder: Path, kind: str) -> Path:
    """Prompts and answers as a source."""
    folder.mkdir(exist_ok=True)
    path = folder / kind
    content = pa.table(
        {"a": [a for _, a in ROWS], "q": pa.array([q for q, _ in ROWS]).dictionary_encode(), "n": [*range(23)]}
    )
    if kind == "a.parquet":
        pq.write_table(content, path, row_group_size=7)
    elif kind == "a.arrow":
        write_file(path, content, rows=len(ROWS))
    else:
        path.write_text("".join(json.dumps({"n": 1, "a": a, "q": q}) + "\n" for q, a in ROWS), encoding="utf-8")
    return path


def wanted(tokenizer: TextTokenizer) -> Pieces:
    """Ids of each prompt and of each answer, encoded apart."""
    actual = [tuple(ids.tolist() for ids in tokenizer.encode(row)) for row in ROWS]
    return [(prompt, [*answer, tokenizer.end_id]) for prompt, answer in actual]


def prepared(folder: Path, kind: str, **options: Any) -> PreparedCorpus:
    prepare(write(folder, kind), out=folder / f"{kind}-o.arrow", field="a", prompt="q", **options)
    return PreparedCorpus(folder / f"{kind}-o.arrow")


@pytest.mark.parametrize("kind", ["a.jsonl", "a.parquet", "a.arrow"])
@pytest.mark.parametrize("as_ids", [True, False])
def test_documents_of_every_source_know_their_prompts(
    tmp_path: Path, tokenizer: TextTokenizer, kind: str, as_ids: bool
) -> None:
    corpus = prepared(tmp_path, kind, tokenizer=tokenizer.path if as_ids else None)
    assert corpus.has_prompts
    documents = Documents(corpus, tokenizer, VOCABULARY, 0.0)
    for number, (prompt, answer) in enumerate(wanted(tokenizer)):
        content = corpus.content(number)
        if not as_ids:
            assert content.decode() == "".join(ROWS[number])
        (ids,) = documents.ids([content], [corpus.prompt(number, content)])
        assert ids.tolist() == [*(token | PROMPT_BIT for token in prompt), *answer]
    table = pa.ipc.open_file(str(corpus.path)).read_all()
    assert table.schema.names == ["ids" if as_ids else "text", "prompt"]


FLAGGED = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=25)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FLAGGED, st.sampled_from(["concat", "best_fit"]), st.booleans())
def test_targets_are_the_answers_and_no_other_token(
    lengths: list[tuple[int, int]], packing: str, doc_mask: bool
) -> None:
    """Every token has its own id, so that a row names what it holds; the reference counts answers one by one."""
    documents, next_id, prompts = [], 1, set[int]()
    for prompt, answer in lengths * 80:
        ids = np.arange(next_id, next_id + prompt + answer)
        prompts.update(ids[:prompt].tolist())
        documents.append(streams._marked(np.append(ids, 0).astype(np.uint32), prompt))
        next_id += prompt + answer
    lane: ConcatLane | BestFitLane = ConcatLane(enumerate(documents), SEQ_LEN, (0, 0))
    if packing == "best_fit":
        lane = BestFitLane(enumerate(documents), SEQ_LEN, (0, 0), 5)
    rows = np.stack([lane.row().astype(np.int32).astype(np.int64) for _ in range(2)])
    batch = batch_of(rows, 1, end_id=0, doc_mask=doc_mask)
    counted = 0
    for inputs, targets, row in zip(batch.inputs.reshape(2, -1), batch.targets.reshape(2, -1), rows, strict=True):
        for index, (given_id, target) in enumerate(zip(inputs.tolist(), targets.tolist(), strict=True)):
            plain = [int(token) & ID_MASK if token >= 0 else None for token in row[index : index + 2]]
            assert given_id == (plain[0] or 0)
            is_counted = plain[1] is not None and plain[1] not in prompts and not (doc_mask and given_id == 0)
            assert target == (plain[1] if is_counted else IGNORE_INDEX)
            counted += is_counted
    assert batch.num_tokens == counted


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_text_and_ids_give_the_same_rows(
    tmp_path: Path, tokenizer: TextTokenizer, packing: Literal["concat", "best_fit"]
) -> None:
    corpora = [
        prepared(tmp_path / name, "a.jsonl", **options)
        for name, options in (("t", {}), ("i", {"tokenizer": tokenizer.path}))
    ]
    order = LaneOrder(2, 4, True)
    lanes = [open_lane(Documents(c, tokenizer, VOCABULARY, 0.0), packing, SEQ_LEN, order, 1) for c in corpora]
    for _ in range(12):
        text, ids = (lane.row() for lane in lanes)
        assert text.tolist() == ids.tolist()


def test_an_evaluation_counts_answers_only(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    corpus = prepared(tmp_path, "a.jsonl")
    config = {"source": "arrow", "path": str(corpus.path), "validation_fraction": 0.4, "tokenizer": str(tokenizer.path)}
    data = open_at(tmp_path / "work", seq_len=SEQ_LEN, vocab_size=VOCABULARY, validation_rows=50, **config)
    assert data.validation is not None
    held = [number for number in range(len(corpus)) if is_held_out(corpus.content(number), 0.4)]
    stream = [
        (token, is_answer)
        for number in held
        for is_answer, part in enumerate(wanted(tokenizer)[number])
        for token in part
    ]
    num_rows = data.validation.num_rows
    assert num_rows == (len(stream) - 1) // SEQ_LEN > 1
    counted = [token for token, is_answer in stream[1 : num_rows * SEQ_LEN + 1] if is_answer]
    loader = Loader(data.validation, BatchShare(num_rows, 1), seed=0, shuffle=False, past_end="pad")
    batch = loader.batch(0)
    assert batch.targets[batch.targets != IGNORE_INDEX].tolist() == counted
    assert batch.inputs.max() < VOCABULARY
    assert target_counts(data.validation).tolist() == np.bincount(counted).tolist()
    assert Summary.of(1.0, data, 50).val_tokens == len(counted)


def test_what_cannot_be_is_refused_and_bad_rows_are_named(tmp_path: Path) -> None:
    prepare_rows = partial(prepare, out=tmp_path / "o.arrow", field="a", prompt="q")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"a\.txt is text without fields"):
        prepare_rows(tmp_path / "a.txt")
    with pytest.raises(ConfigError, match="are one field; name two"):
        prepare_rows(write(tmp_path, "a.jsonl"), prompt="a")
    lines = ['{"a": "x", "q": null}', '{"a": "x", "q": 3}', '{"a": " ", "q": "x"}', '{"a": "x", "q": ""}', "[]"]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    summary = prepare_rows(tmp_path / "b.jsonl", on_bad="skip").summary
    assert [summary[key] for key in ("rows", "documents", "empty")] == [5, 1, 1]
    assert summary["skipped"] == {"missing field": 1, "wrong type": 2}
    pq.write_table(pa.table({"a": ["x", "y"], "q": ["p", None]}), tmp_path / "c.parquet")
    prepare_rows(tmp_path / "c.parquet", on_bad="skip", restart=True)
    assert len(PreparedCorpus(tmp_path / "o.arrow")) == 1
    (tmp_path / "d.jsonl").write_text('{"a": "x", "q": "p"}')
    for source in (tmp_path / "c.parquet", tmp_path / "d.jsonl"):
        with pytest.raises(DataError, match=r'no (column )?"z"; .*; choose one with --prompt'):
            prepare_rows(source, prompt="z", restart=True)
        with pytest.raises(DataError, match=r'no (column )?"z"; .*; choose one with --field'):
            prepare_rows(source, field="z", restart=True)


def test_another_prompt_is_another_corpus(tmp_path: Path) -> None:
    corpus = prepared(tmp_path, "a.jsonl")
    with pytest.raises(DataError, match="prompt: 'q' there, '' here"):
        prepare(tmp_path / "a.jsonl", out=Path(corpus.path), field="a")


@pytest.mark.parametrize("length", [-1, 1 << 40, 13])
def test_a_damaged_length_of_a_prompt_is_named(tmp_path: Path, tokenizer: TextTokenizer, length: int) -> None:
    """13 bytes of `question 1 [snowman]` end inside of the snowman."""
    path = prepared(tmp_path, "a.jsonl").path
    assert isinstance(path, Path)
    drop_checksums(path)
    corpus = PreparedCorpus(path)
    documents = Documents(corpus, tokenizer, VOCABULARY, 0.0)
    list(islice(documents.lane(LaneOrder(1, 0, False), 0), 3))
    (batch,) = corpus._batches
    content = bytearray(path.read_bytes())
    content[batch.extra[0] + 8 : batch.extra[0] + 16] = length.to_bytes(8, "little", signed=True)
    path.write_bytes(content)
    damaged = Documents(PreparedCorpus(path), tokenizer, VOCABULARY, 0.0)
    with pytest.raises(DataError, match=r"document 1 of 23, is damaged: its prompt has a length of"):
        list(islice(damaged.lane(LaneOrder(1, 0, False), 0), 3))
