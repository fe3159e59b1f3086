"""Pairs of answers: their forms as a corpus, the documents that they become, and rows that never split one."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nxtrain.common.errors import ConfigError, DataError
from nxtrain.common.vocab import END_BIT, ID_MASK, IGNORE_INDEX, PROMPT_BIT
from nxtrain.data.arrow.inspection import inspect_corpus
from nxtrain.data.arrow.pairs import PairSamples
from nxtrain.data.arrow.preparation import PreparationOutcome, Watcher, prepare_corpus
from nxtrain.data.arrow.preparation_request import PreparationRequest
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.loader import Batch, BatchShare, Loader
from nxtrain.data.packing import best_fit
from tests.support.conversations import FAMILIES, VOCABULARY, write_family
from tests.support.corpora import write_tokenizer

WORDS = ("snow", "document", "and", "the", "end", "x\ny", "\u2603")


def drawn_text(rng: Random, most: int = 6) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))


def drawn_rows(rng: Random, number: int) -> list[dict[str, Any]]:
    """Pairs with a prompt; the answers differ in their first word."""
    return [
        {"prompt": f"{drawn_text(rng)}?", "chosen": f" yes {drawn_text(rng)}", "rejected": f" no {drawn_text(rng)}"}
        for _ in range(number)
    ]


def as_turns(row: dict[str, Any]) -> dict[str, Any]:
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return {name: [{"role": role, "content": row[name]}] for name, role in roles.items()}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows as JSON Lines, as Parquet or as an Arrow stream, by the name of the file."""
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    return path


def prepare(source: Path, out: Path, tokenizer: Path, **options: Any) -> PreparationOutcome:
    return prepare_corpus(PreparationRequest([source], out, tokenizer=tokenizer, pairs=True, **options), Watcher())


def documents_of(path: Path) -> list[tuple[list[int], int]]:
    """Ids of each document, and the tokens of its prompt."""
    corpus = PreparedCorpus(path)
    assert corpus.has_pairs
    contents = [corpus.content(document) for document in range(len(corpus))]
    return [(corpus.ids(number).tolist(), corpus.prompt(number, content)) for number, content in enumerate(contents)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_strings_become_two_documents_of_each_pair(kind: str, tmp_path: Path) -> None:
    tokenizer, rows = write_tokenizer(tmp_path / "tokenizer", VOCABULARY), drawn_rows(Random(1), 7)
    prepare(write_rows(tmp_path / f"pairs.{kind}", rows), tmp_path / "out.arrow", tokenizer)
    from tokenizers import Tokenizer

    encode, wanted = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json")).encode, []
    for row in rows:
        prompt = encode(row["prompt"]).ids
        wanted += [([*prompt, *encode(row[side]).ids, 0], len(prompt)) for side in ("chosen", "rejected")]
    assert documents_of(tmp_path / "out.arrow") == wanted


@pytest.mark.parametrize("family", ["chatml", "llama3", "qwen with blocks"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_turns_are_written_as_transformers_writes_them(family: str, kind: str, tmp_path: Path) -> None:
    tokenizer, rows = write_family(tmp_path / "base", FAMILIES[family]), drawn_rows(Random(2), 5)
    turns = [as_turns(row) for row in rows]
    prepare(write_rows(tmp_path / f"pairs.{kind}", turns), tmp_path / "out.arrow", tmp_path / "base", chat=True)
    eos, wanted = tokenizer.convert_tokens_to_ids(FAMILIES[family].eos), []
    for row in turns:
        prompt = list(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"])
        for side in ("chosen", "rejected"):
            whole = list(tokenizer.apply_chat_template(row["prompt"] + row[side])["input_ids"])
            assert whole[: len(prompt)] == prompt
            wanted.append((whole[: whole.index(eos, len(prompt)) + 1], len(prompt)))
    assert documents_of(tmp_path / "out.arrow") == wanted


def test_every_form_of_a_pair_gives_the_same_documents(tmp_path: Path) -> None:
    write_family(tmp_path / "base", FAMILIES["chatml"])
    rows = drawn_rows(Random(3), 4)
    turns = [as_turns(row) for row in rows]
    whole = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in turns]
    forms = {
        "turns": turns,
        "strings": rows,
        "implicit": whole,
        "repeated": [{"prompt": row["prompt"], **both} for row, both in zip(rows, whole, strict=True)],
        "mixed": [{**row, "prompt": plain["prompt"]} for row, plain in zip(turns, rows, strict=True)],
    }
    results = {}
    for name, form in forms.items():
        source = write_rows(tmp_path / f"{name}.jsonl", form)
        prepare(source, tmp_path / f"{name}.arrow", tmp_path / "base", chat=True)
        results[name] = documents_of(tmp_path / f"{name}.arrow")
    assert all(documents == results["turns"] for documents in results.values())


def test_a_prompt_that_both_strings_begin_with_ends_at_white_space(tmp_path: Path) -> None:
    tokenizer, rows = write_tokenizer(tmp_path / "tokenizer", VOCABULARY), drawn_rows(Random(4), 6)
    implicit = [{side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in rows]
    implicit.append({"chosen": "it is blue", "rejected": "it is brown"})
    rows.append({"prompt": "it is", "chosen": " blue", "rejected": " brown"})
    for name, form in (("given", rows), ("implicit", implicit)):
        prepare(write_rows(tmp_path / f"{name}.jsonl", form), tmp_path / f"{name}.arrow", tokenizer)
    assert documents_of(tmp_path / "given.arrow") == documents_of(tmp_path / "implicit.arrow")


GOOD = {"prompt": "a", "chosen": " b", "rejected": " c"}
TURN = {"role": "assistant", "content": "b"}
BAD: dict[str, tuple[dict[str, Any], bool, str]] = {
    "no answer": ({"prompt": "a", "chosen": "b"}, False, 'missing field: no "rejected"'),
    "equal": ({**GOOD, "rejected": " b"}, False, "bad pair: both answers are equal"),
    "empty": ({**GOOD, "chosen": " "}, False, "bad pair: chosen has no text"),
    "turns without a template": ({**GOOD, "chosen": [TURN]}, False, "is a list of turns; give --chat"),
    "number": ({**GOOD, "chosen": 3}, False, 'wrong type: "chosen" is not a string'),
    "surrogate": ({**GOOD, "prompt": "\ud800"}, False, 'invalid UTF-8: "prompt" holds half of a surrogate pair'),
    "two turns": ({**GOOD, "chosen": [TURN, TURN]}, True, "bad pair: chosen has 2 turns after the 1 that both"),
    "answer of a user": ({**GOOD, "chosen": [{**TURN, "role": "user"}]}, True, "is one turn of the assistant"),
    "equal turns": ({**GOOD, "chosen": "x", "rejected": "x"}, True, "bad pair: both answers are equal"),
    "special token": ({**GOOD, "chosen": "<|im_end|>"}, True, "special token: turn 2 contains the special token"),
    "turn without content": ({**GOOD, "rejected": [{"role": "assistant"}]}, True, '"rejected": turn 1 has no text'),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_pair_is_named_by_its_row_or_skipped_whole(name: str, tmp_path: Path) -> None:
    row, chat, reason = BAD[name]
    write_family(tmp_path / "base", FAMILIES["chatml"])
    source = write_rows(tmp_path / "pairs.jsonl", [GOOD, row, GOOD])
    with pytest.raises(DataError) as refused:
        prepare(source, tmp_path / "stopped.arrow", tmp_path / "base", chat=chat)
    assert f"{source}, row 2: " in str(refused.value) and reason in str(refused.value)
    outcome = prepare(source, tmp_path / "out.arrow", tmp_path / "base", chat=chat, on_bad="skip")
    assert (outcome.summary["documents"], outcome.summary["rows"]) == (4, 3)
    assert sum(outcome.summary["skipped"].values()) == 1
    (line,) = map(json.loads, outcome.outputs.bad.read_text(encoding="utf-8").splitlines())
    assert line["row"] == 2
    documents = documents_of(tmp_path / "out.arrow")
    assert documents[:2] == documents[2:]


def test_options_that_pairs_contradict_are_refused(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "pairs.jsonl", [GOOD])
    for options, reason in (
        ({"tokenizer": None}, "--pairs writes answers as ids"),
        ({"prompt": "x"}, "--pairs reads the fields prompt, chosen, rejected"),
    ):
        request = PreparationRequest([source], tmp_path / "out.arrow", pairs=True, **options)
        with pytest.raises(ConfigError, match=reason):
            prepare_corpus(request, Watcher())


def test_an_inspection_shows_pairs(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", VOCABULARY)
    rows = drawn_rows(Random(5), 5)
    prepare(write_rows(tmp_path / "pairs.jsonl", rows), tmp_path / "out.arrow", tokenizer)
    result = inspect_corpus(tmp_path / "out.arrow", seq_len=64, tokenizer=tokenizer)
    assert (result["pairs"], result["documents"]) == (5, 10)
    assert [sample["pair"] for sample in result["samples"]] == [0, 2, 4]
    assert rows[0]["prompt"].endswith(result["samples"][0]["prompt"][-4:])
    assert result["samples"][0]["chosen"].startswith(" yes") and result["samples"][0]["rejected"].startswith(" no")


# --- rows ----------------------------------------------------------------------------------------------------------


def samples_of(
    tmp_path: Path, rng: Random, number: int, **options: Any
) -> tuple[PairSamples, list[tuple[list[int], int]]]:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", VOCABULARY)
    prepare(write_rows(tmp_path / "pairs.jsonl", drawn_rows(rng, number)), tmp_path / "out.arrow", tokenizer)
    given = {"seq_len": 90, "vocab_size": VOCABULARY, "pairs_per_row": 3, **options}
    return PairSamples(PreparedCorpus(tmp_path / "out.arrow"), **given), documents_of(tmp_path / "out.arrow")


@pytest.mark.parametrize("seed", range(4))
def test_rows_hold_every_pair_whole_and_once(seed: int, tmp_path: Path) -> None:
    rng = Random(seed)
    samples, documents = samples_of(tmp_path, rng, 40, seq_len=rng.randint(40, 120), pairs_per_row=rng.randint(1, 4))
    lengths = [len(documents[2 * pair][0]) + len(documents[2 * pair + 1][0]) for pair in range(40)]
    fitting = [pair for pair, length in enumerate(lengths) if length <= samples.seq_len + 1]
    assert (samples.num_pairs, samples.num_long) == (len(fitting), 40 - len(fitting))
    left_out = f" without {samples.num_long} that are longer than a row," if samples.num_long else ""
    assert samples.describe() == f"{samples.num_pairs} pairs{left_out} in {samples.num_rows} rows"
    indices, seen = np.arange(samples.num_rows), []
    for row, padded in zip(samples.rows(indices), samples.answers(indices), strict=True):
        tokens = row[row != IGNORE_INDEX]
        actual = np.split(tokens, np.flatnonzero(tokens & END_BIT) + 1)[:-1]
        numbers = padded[padded >= 0].tolist()
        assert len(actual) == len(numbers) <= 2 * samples.pairs_per_row
        assert numbers[1::2] == [number + 1 for number in numbers[::2]] and all(n % 2 == 0 for n in numbers[::2])
        for ids, number in zip(actual, numbers, strict=True):
            wanted, num_prompt = documents[number]
            assert (ids & ID_MASK & ~PROMPT_BIT).tolist() == wanted
            assert (ids & PROMPT_BIT != 0).tolist() == [index < num_prompt for index in range(len(wanted))]
        seen += numbers[::2]
    assert sorted(seen) == [2 * pair for pair in fitting]


def answers_in(batch: Batch) -> list[tuple[int, ...]]:
    """Targets of each answer, found by its number."""
    assert batch.answers is not None
    results = []
    shape = (-1, batch.targets.shape[-1])
    lengths = batch.answers.lengths.reshape(-1, batch.answers.lengths.shape[-1])
    for numbers, targets, of_row in zip(
        batch.answers.numbers.reshape(shape), batch.targets.reshape(shape), lengths, strict=True
    ):
        for number, length in enumerate(of_row.tolist()):
            own = targets[(numbers == number) & (targets != IGNORE_INDEX)]
            assert len(own) == length
            if length:
                results.append(tuple(own.tolist()))
    return results


@pytest.mark.parametrize(("dp", "micro"), [(1, 4), (2, 1), (2, 2), (4, 1)])
def test_ranks_and_micro_batches_share_whole_pairs(dp: int, micro: int, tmp_path: Path) -> None:
    samples, documents = samples_of(tmp_path, Random(9), 30)
    reference = np.arange(len(documents), dtype=np.float32)
    samples = samples.with_reference(reference[None])
    answers = [tuple(ids[max(1, prompt) :]) for ids, prompt in documents]
    of_ranks = [
        Loader(samples, BatchShare(4, micro, rank, dp), seed=0, shuffle=False, doc_mask=True) for rank in range(dp)
    ]
    for step in range(samples.num_rows // 4):
        results = []
        for loader in of_ranks:
            batch = loader.batch(step)
            results += answers_in(batch)
            assert batch.answers is not None and batch.answers.reference is not None
            numbers = samples.answers(loader.indices(step)).reshape(batch.answers.reference.shape)
            assert (batch.answers.reference == np.where(numbers < 0, 0, numbers)).all()
        wanted = samples.answers(np.arange(4 * step, 4 * step + 4))
        assert results == [answers[number] for number in wanted.ravel() if number >= 0]


def test_rows_after_the_last_have_no_pair(tmp_path: Path) -> None:
    samples, _ = samples_of(tmp_path, Random(9), 5)
    rows = samples.num_rows
    loader = Loader(samples, BatchShare(rows + 3, 1), seed=0, shuffle=False, doc_mask=True, past_end="pad")
    batch = loader.batch(0)
    assert batch.answers is not None
    assert (batch.answers.lengths[:rows].sum(axis=(1, 2)) > 0).all() and not batch.answers.lengths[rows:].any()


def test_pairs_that_are_held_out_are_the_others(tmp_path: Path) -> None:
    train, _ = samples_of(tmp_path, Random(6), 60, held_out=0.3)
    corpus, given = PreparedCorpus(tmp_path / "out.arrow"), {"seq_len": 90, "vocab_size": VOCABULARY}
    held_out = PairSamples(corpus, **given, pairs_per_row=3, held_out=0.3, on_held_out_side=True)
    sides = [set(item.answers(np.arange(item.num_rows)).ravel().tolist()) - {-1} for item in (train, held_out)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 120 and 20 < len(sides[1]) < 60


def test_rows_too_short_for_any_pair_are_refused_with_a_length(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"every pair is longer than a row, .*set train.seq_len=\d+ or more"):
        samples_of(tmp_path, Random(7), 5, seq_len=3)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_row_has_at_most_so_many_pieces(most: int) -> None:
    rng = Random(most)
    lengths = np.array([rng.randint(1, 20) for _ in range(200)])
    packing = best_fit(lengths, 40, most_pieces=most)
    assert np.bincount(packing.rows).max() == most
    assert sorted(packing.documents) == list(range(200)) and packing.num_rows >= 200 / most
