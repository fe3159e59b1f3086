"""Measures of held-out text: the entropy of its tokens, and the bytes of exactly the tokens that are evaluated."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from nxtrain.common.vocab import ID_MASK
from nxtrain.data import held_out, target_bytes, unigram_entropy
from nxtrain.data.held_out import target_counts, token_bytes
from nxtrain.data.samples import TableSamples
from nxtrain.data.tokenization import END_OF_TEXT, load_tokenizer, train_bpe
from nxtrain.train.results import Summary
from tests.support.corpora import rows_of_stream
from tests.unit.data.conftest import OpenAlone

TEXTS = [
    "def name(argument):\n    return argument\n\n\n" * 3,
    "na\xefve caf\xe9, \u4f60\u597d \U0001f642\U0001f642 and \x01\x7f\xa0",
    f"  {END_OF_TEXT} spelled in text \U0001f600",
]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    train_bpe([TEXTS[0], "the quick brown fox caf\xe9 \u4f60\u597d " * 20], 300, path)
    return path


def stream_of(tokenizer: Path) -> NDArray[np.int64]:
    """Tokens of the texts, each followed by the end of a document."""
    loaded = load_tokenizer(tokenizer, 300)
    return np.concatenate([[*ids, loaded.end_id] for ids in loaded.encode(TEXTS)]).astype(np.int64)


def spelled(tokenizer: Path) -> dict[int, bytes]:
    """Bytes of each token, by the table that GPT-2 was published with (`bytes_to_unicode` in its encoder.py)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    byte_of = {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    vocabulary = Tokenizer.from_file(str(tokenizer)).get_vocab()
    return {
        number: b"" if token == END_OF_TEXT else bytes(byte_of[character] for character in token)
        for token, number in vocabulary.items()
    }


def test_unigram_entropy_is_that_of_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    # Targets: half 1, a quarter 2, a quarter 70000; the first column is never a target.
    table = np.array([[1, 1, 1, 2, 70000]] * 6)
    expected = 0.5 * math.log(2) + 0.5 * math.log(4)
    assert unigram_entropy(target_counts(TableSamples(table))) == pytest.approx(expected, rel=1e-12)
    monkeypatch.setattr(held_out, "_CHUNK_TOKENS", 8)
    reversed_expected = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    assert unigram_entropy(target_counts(TableSamples(table[:, ::-1]))) == pytest.approx(reversed_expected, rel=1e-12)


def test_the_bytes_of_all_tokens_of_a_text_are_the_bytes_of_the_text(tokenizer: Path) -> None:
    lengths = token_bytes(tokenizer)
    assert lengths is not None
    for text, ids in zip(TEXTS, load_tokenizer(tokenizer, 300).encode(TEXTS), strict=True):
        assert lengths[ids].sum() == len(text.encode())
    assert lengths[0] == 0, "the end of a document stands for no text"


@pytest.mark.parametrize("seq_len", [1, 3, 7, 50])
@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_rows_that_cut_documents_and_characters_count_the_bytes_of_their_own_targets(
    tokenizer: Path, seq_len: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_out, "_CHUNK_TOKENS", chunk)
    stream, bytes_of = stream_of(tokenizer), spelled(tokenizer)
    assert b"".join(bytes_of[number] for number in stream.tolist()) == "".join(TEXTS).encode()
    samples = TableSamples(rows_of_stream(stream, seq_len))
    for num_rows in range(1, samples.num_rows + 3):
        # The first token of the stream is not a target, and neither are those after the last row.
        evaluated = stream[1 : 1 + min(num_rows, samples.num_rows) * seq_len]
        text = b"".join(bytes_of[number] for number in evaluated.tolist())
        assert target_bytes(target_counts(samples, num_rows), tokenizer) == len(text)
    assert target_bytes(target_counts(samples), tokenizer) == len(text)


def test_a_model_that_knows_nothing_needs_eight_bits_for_a_byte(tmp_path: Path, open_alone: OpenAlone) -> None:
    """256 equally likely bytes: ln 256 nats for each target, or 8 bits. A target of 2 bytes would halve that."""
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text(f"{number}" * 64)
    data = open_alone(source="text", path=str(tmp_path / "*.txt"), validation_fraction=0.4, vocab_size=257)
    assert data.validation is not None
    for num_rows in (1, 5, 1000):
        rows = min(num_rows, data.validation.num_rows)
        targets = data.validation.rows(np.arange(rows))[:, 1:] & ID_MASK
        num_ends = int(np.count_nonzero(targets == 0))
        assert (num_rows < 1000) or num_ends > 0
        summary = Summary.of(math.log(256), data, num_rows)
        assert (summary.val_tokens, summary.val_bytes) == (targets.size, targets.size - num_ends)
        assert summary.bits_per_byte == pytest.approx(8 * targets.size / (targets.size - num_ends), rel=1e-12)
        assert f"{summary.bits_per_byte:.4f} bits per byte" in str(summary)
        inputs = data.validation.rows(np.arange(rows))[:, :-1] & ID_MASK
        masked = targets[inputs != 0]
        result = Summary.of(math.log(256), data, num_rows, doc_mask=True)
        assert (result.val_tokens, result.val_bytes) == (masked.size, int(np.count_nonzero(masked)))


def changed(tokenizer: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    content = json.loads(tokenizer.read_text(encoding="utf-8"))
    change(content)
    tokenizer.write_text(json.dumps(content), encoding="utf-8")
    return tokenizer


REMOVES = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
PARTED = {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Isolated", "invert": False}
SPELLS = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.update(normalizer={"type": "NFC"}),
        lambda file: file.update(decoder={"type": "Fuse"}),
        lambda file: file["pre_tokenizer"].update(add_prefix_space=True),
        lambda file: file.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [REMOVES, SPELLS]}),
        lambda file: file.update(pre_tokenizer={"type": "Sequence", "pretokenizers": [PARTED]}),
        lambda file: file.update(pre_tokenizer={"type": "WhitespaceSplit"}),
        lambda file: file["model"]["vocab"].update({"not a byte": file["model"]["vocab"].pop("!")}),
    ],
)
def test_a_tokenizer_that_changes_text_has_no_bytes(
    tokenizer: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    assert token_bytes(changed(tokenizer, change)) is None
    assert target_bytes(target_counts(TableSamples(np.ones((2, 3), np.int64))), tokenizer) is None


def test_a_tokenizer_that_splits_text_first_as_that_of_llama_3_does_has_bytes(tokenizer: Path) -> None:
    before = token_bytes(tokenizer)
    parts = {"type": "Sequence", "pretokenizers": [PARTED, {"type": "Digits", "individual_digits": True}, SPELLS]}
    after = token_bytes(changed(tokenizer, lambda file: file.update(pre_tokenizer=parts)))
    assert before is not None
    np.testing.assert_array_equal(after, before)
    for text, ids in zip(TEXTS, load_tokenizer(tokenizer, 300).encode(TEXTS), strict=True):
        assert before[ids].sum() == len(text.encode())


def test_added_tokens_count_their_own_text_and_special_ones_none(tokenizer: Path) -> None:
    loaded = Tokenizer.from_file(str(tokenizer))
    loaded.add_tokens([AddedToken("\xe9t\xe9", normalized=False)])
    loaded.add_special_tokens(["<|pad|>"])
    loaded.save(str(tokenizer))
    lengths = token_bytes(tokenizer)
    assert lengths is not None
    assert lengths[300:].tolist() == [len("\xe9t\xe9".encode()), 0]
    loaded.add_tokens([AddedToken("wide", lstrip=True)])
    loaded.save(str(tokenizer))
    assert token_bytes(tokenizer) is None


def test_ids_that_the_tokenizer_does_not_know_have_no_bytes(tokenizer: Path) -> None:
    assert target_bytes(target_counts(TableSamples(np.array([[1, 2, 299]]))), tokenizer) is not None
    assert target_bytes(target_counts(TableSamples(np.array([[1, 2, 300]]))), tokenizer) is None

    def move_last(file: dict[str, Any]) -> None:
        vocabulary = file["model"]["vocab"]
        vocabulary[max(vocabulary, key=vocabulary.get)] = 310

    changed(tokenizer, move_last)
    assert target_bytes(target_counts(TableSamples(np.array([[1, 2, 310]]))), tokenizer) is not None
    assert target_bytes(target_counts(TableSamples(np.array([[1, 2, 305]]))), tokenizer) is None


def test_a_tokenizer_that_is_gone_or_damaged_at_the_end_has_no_bytes(tokenizer: Path) -> None:
    tokenizer.write_text(tokenizer.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    assert token_bytes(tokenizer) is None
    tokenizer.unlink()
    assert token_bytes(tokenizer) is None
