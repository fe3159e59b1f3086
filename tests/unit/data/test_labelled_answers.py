"""Labelled answers: their forms as a corpus, the documents that they become, and rows with other answers."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from nxtrain.common.errors import ConfigError, DataError
from nxtrain.common.vocab import DESIRABLE_BIT, END_BIT, IGNORE_INDEX
from nxtrain.data.arrow.pairs import PairSamples, check_answers
from nxtrain.data.arrow.preparation import PreparationOutcome, Watcher, prepare_corpus
from nxtrain.data.arrow.preparation_request import PreparationRequest
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.loader import BatchShare, Loader, swap_answers
from nxtrain.data.samples import AnswerRows
from tests.support.conversations import FAMILIES, VOCABULARY, write_family
from tests.support.corpora import write_tokenizer
from tests.support.labelled import drawn_answers, other_answers, rows_of_judged
from tests.unit.data.test_pairs import drawn_text, write_rows


def drawn_rows(rng: Random, number: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{drawn_text(rng)}?", "completion": f" {drawn_text(rng)}", "label": rng.random() < 0.5}
        for _ in range(number)
    ]


def prepare(source: Path, out: Path, tokenizer: Path, **options: Any) -> PreparationOutcome:
    return prepare_corpus(PreparationRequest([source], out, tokenizer=tokenizer, labels=True, **options), Watcher())


def documents_of(path: Path) -> list[tuple[list[int], int, bool]]:
    """Ids of each document, the tokens of its prompt, and its label."""
    corpus = PreparedCorpus(path)
    assert corpus.has_labels and not corpus.has_pairs
    contents = [corpus.content(document) for document in range(len(corpus))]
    prompts = [corpus.prompt(number, content) for number, content in enumerate(contents)]
    return [(corpus.ids(n).tolist(), prompts[n], label) for n, label in enumerate(corpus.labels().tolist())]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_strings_become_documents_with_labels(kind: str, tmp_path: Path) -> None:
    tokenizer, rows = write_tokenizer(tmp_path / "tokenizer", VOCABULARY), drawn_rows(Random(1), 9)
    prepare(write_rows(tmp_path / f"rows.{kind}", rows), tmp_path / "out.arrow", tokenizer)
    from tokenizers import Tokenizer

    encode, wanted = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json")).encode, []
    for row in rows:
        prompt = encode(row["prompt"]).ids
        wanted.append(([*prompt, *encode(row["completion"]).ids, 0], len(prompt), row["label"]))
    assert documents_of(tmp_path / "out.arrow") == wanted


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_turns_are_written_as_transformers_writes_them(kind: str, tmp_path: Path) -> None:
    tokenizer, rows = write_family(tmp_path / "base", FAMILIES["chatml"]), drawn_rows(Random(2), 5)
    turns = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
            "label": row["label"],
        }
        for row in rows
    ]
    prepare(write_rows(tmp_path / f"rows.{kind}", turns), tmp_path / "out.arrow", tmp_path / "base", chat=True)
    eos, wanted = tokenizer.convert_tokens_to_ids(FAMILIES["chatml"].eos), []
    for row in turns:
        prompt = list(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"])
        whole = list(tokenizer.apply_chat_template(row["prompt"] + row["completion"])["input_ids"])
        wanted.append((whole[: whole.index(eos, len(prompt)) + 1], len(prompt), row["label"]))
    assert documents_of(tmp_path / "out.arrow") == wanted


GOOD = {"prompt": "a", "completion": " b", "label": True}
BAD: dict[str, tuple[dict[str, Any], bool, str]] = {
    "no label": ({"prompt": "a", "completion": "b"}, False, 'missing field: no "label"'),
    "no prompt": ({"completion": "b", "label": False}, False, 'missing field: no "prompt"'),
    "number": ({**GOOD, "label": 1}, False, 'wrong type: "label" is neither true nor false'),
    "blank answer": ({**GOOD, "completion": " "}, False, "bad answer: completion has no text"),
    "blank prompt": ({**GOOD, "prompt": ""}, False, "bad answer: prompt has no text"),
    "turns": ({**GOOD, "completion": []}, False, "is a list of turns; give --chat"),
    "two turns": (
        {**GOOD, "completion": [{"role": "assistant", "content": "b"}] * 2},
        True,
        "bad answer: completion has 2 turns",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_answer_is_named_by_its_row_or_skipped(name: str, tmp_path: Path) -> None:
    row, chat, reason = BAD[name]
    write_family(tmp_path / "base", FAMILIES["chatml"])
    source = write_rows(tmp_path / "rows.jsonl", [GOOD, row, {**GOOD, "label": False}])
    with pytest.raises(DataError) as refused:
        prepare(source, tmp_path / "stopped.arrow", tmp_path / "base", chat=chat)
    assert f"{source}, row 2: " in str(refused.value) and reason in str(refused.value)
    prepare(source, tmp_path / "out.arrow", tmp_path / "base", chat=chat, on_bad="skip")
    assert [label for _, _, label in documents_of(tmp_path / "out.arrow")] == [True, False]


def test_objectives_and_options_that_labels_contradict_are_refused(tmp_path: Path) -> None:
    tokenizer, source = write_tokenizer(tmp_path / "tokenizer", VOCABULARY), write_rows(tmp_path / "a.jsonl", [GOOD])
    prepare(source, tmp_path / "out.arrow", tokenizer)
    for answers in (None, AnswerRows(2)):
        with pytest.raises(DataError, match="--pairs" if answers else "set finetune.objective=kto"):
            check_answers(PreparedCorpus(tmp_path / "out.arrow"), answers)
    with pytest.raises(ConfigError, match="--pairs and --labels"):
        prepare(source, tmp_path / "both.arrow", tokenizer, pairs=True)
    with pytest.raises(ConfigError, match="--labels writes answers as ids"):
        prepare_corpus(PreparationRequest([source], tmp_path / "text.arrow", labels=True), Watcher())


@pytest.mark.parametrize("seed", range(20))
def test_other_answers_keep_prompts_and_the_length_of_a_row(seed: int) -> None:
    rng = Random(seed)
    judged = [drawn_answers(rng, 30, 64, 6, least=0) for _ in range(5)]
    swapped = swap_answers(rows_of_judged(judged, 30))
    wanted = [
        [answer._replace(is_desirable=row[at - 1].is_desirable) for at, answer in enumerate(others)]
        for row, others in zip(judged, other_answers(judged), strict=True)
    ]
    np.testing.assert_array_equal(swapped, rows_of_judged(wanted, 30))


@pytest.mark.parametrize(("dp", "micro"), [(1, 4), (2, 1), (4, 1)])
def test_ranks_share_whole_answers_with_their_labels_and_references(dp: int, micro: int, tmp_path: Path) -> None:
    tokenizer, rows = write_tokenizer(tmp_path / "tokenizer", VOCABULARY), drawn_rows(Random(3), 40)
    prepare(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out.arrow", tokenizer)
    corpus = PreparedCorpus(tmp_path / "out.arrow")
    samples = PairSamples(corpus, seq_len=60, vocab_size=VOCABULARY, pairs_per_row=3)
    num_desirable = sum(row["label"] for row in rows)
    assert samples.describe() == f"40 answers, of which {num_desirable} are desirable, in {samples.num_rows} rows"
    reference = np.arange(2 * len(corpus), dtype=np.float32).reshape(2, -1)
    samples = samples.with_reference(reference)
    seen: list[int] = []
    loaders = [
        Loader(samples, BatchShare(4, micro, rank, dp), seed=0, shuffle=False, doc_mask=True, past_end="pad")
        for rank in range(dp)
    ]
    for step in range(loaders[0].steps_per_epoch):
        for loader in loaders:
            batch = loader.batch(step)
            assert batch.answers is not None and batch.swapped is not None and batch.swapped.answers is not None
            shape = batch.answers.lengths.shape
            numbers = samples.answers(loader.indices(step)).reshape(shape)
            is_there = batch.answers.lengths > 0
            seen += numbers[is_there].tolist()
            assert batch.answers.labels is not None and batch.answers.reference is not None
            assert (batch.answers.labels[is_there] == [rows[n]["label"] for n in numbers[is_there]]).all()
            assert (batch.answers.reference[is_there] == numbers[is_there]).all()
            others = batch.swapped.answers
            assert others.reference is not None
            assert (others.reference[is_there] == 40 + numbers[is_there]).all()
            several = is_there.sum(axis=-1, keepdims=True) > 1
            np.testing.assert_array_equal(others.lengths > 0, is_there & several)
    assert sorted(seen) == list(range(40))


def test_a_row_marks_desirable_answers_at_their_end(tmp_path: Path) -> None:
    tokenizer, rows = write_tokenizer(tmp_path / "tokenizer", VOCABULARY), drawn_rows(Random(4), 12)
    prepare(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out.arrow", tokenizer)
    samples = PairSamples(PreparedCorpus(tmp_path / "out.arrow"), seq_len=60, vocab_size=VOCABULARY, pairs_per_row=4)
    indices = np.arange(samples.num_rows)
    for row, numbers in zip(samples.rows(indices), samples.answers(indices), strict=True):
        tokens = row[row != IGNORE_INDEX]
        ends = tokens[tokens & END_BIT != 0]
        labels = [rows[number]["label"] for number in numbers.tolist() if number >= 0]
        assert (ends & DESIRABLE_BIT != 0).tolist() == labels
        assert not (tokens[tokens & END_BIT == 0] & DESIRABLE_BIT).any()
