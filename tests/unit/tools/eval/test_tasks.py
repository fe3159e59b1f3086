"""Local tasks: the same seed gives the same requests, each has one right answer, and metrics follow from the scores."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from nxtrain.common.errors import DataError, StorageError
from nxtrain.tools.eval import offline
from nxtrain.tools.eval.offline import OFFLINE, offline_task
from nxtrain.tools.eval.scorer import windows
from nxtrain.tools.eval.task import Request, Task

WORDS = [f"{first}{second}" for first in ("alp", "bet", "gam", "del") for second in ("ha", "ma", "ta", "ra")]
TEXTS = [" ".join(random.Random(seed).choices(WORDS, k=60)) for seed in range(30)]
CHOOSING = [name for name in OFFLINE if name != "held_out"]


@pytest.mark.parametrize("name", OFFLINE)
def test_requests_follow_from_text_and_seed(name: str) -> None:
    first, again, other = (offline_task(name, TEXTS, seed, 20) for seed in (3, 3, 4))
    assert first == again
    assert first.requests != other.requests
    assert first.identity == again.identity != other.identity
    assert len(first.requests) == 20
    assert offline_task(name, TEXTS, 3, 5).requests == first.requests[:5]


@pytest.mark.parametrize("name", CHOOSING)
def test_a_request_has_one_right_choice_at_any_place(name: str) -> None:
    requests = offline_task(name, TEXTS, 0, 200).requests
    for request in requests:
        assert len(set(request.choices)) == len(request.choices) >= 4
        assert is_right(name, request, request.choices[request.answer])
        assert name == "cloze" or [c for c in request.choices if is_right(name, request, c)] == [
            request.choices[request.answer]
        ]
    places = Counter(request.answer for request in requests)
    assert set(places) == set(range(len(requests[0].choices)))


def is_right(name: str, request: Request, choice: str) -> bool:
    """Check an answer by the rule of its task, without the code that made the request."""
    words = request.context.split()
    if name == "arithmetic":
        a, _, b, _ = request.context.splitlines()[-1].split()
        return int(a) + int(b) == int(choice)
    if name == "copying":
        first, second = (line.split() for line in request.context.splitlines())
        return [*second, choice.strip()] == first
    if name == "induction":
        return words[words.index(words[-1]) + 1] == choice.strip()
    return any(request.context + choice in text for text in TEXTS)


def test_held_out_pieces_are_of_different_texts() -> None:
    task = offline_task("held_out", TEXTS, 0, 1000)
    assert len(task.requests) == len(TEXTS)
    assert all(any(request.choices[0] in text for text in TEXTS) for request in task.requests)


@pytest.mark.parametrize("name", ["held_out", "cloze", "copying", "induction"])
def test_texts_that_are_too_short_give_no_request(name: str) -> None:
    assert offline_task(name, ["", "one two"] if name != "held_out" else [""], 0, 5).requests == ()


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.floats(-50, 0), min_size=3, max_size=3)), min_size=2))
def test_accuracy_is_the_share_of_likeliest_choices_that_are_right(drawn: list[tuple[int, list[float]]]) -> None:
    task = Task("t", tuple(Request("c", (" a", " b", " c"), answer) for answer, _ in drawn))
    result = task.measure([scores for _, scores in drawn])
    right = [float(scores.index(max(scores)) == answer) for answer, scores in drawn]
    assert result["accuracy"] == pytest.approx(statistics.fmean(right))
    assert result["stderr"] == pytest.approx(statistics.stdev(right) / math.sqrt(len(right)))
    assert result["n"] == len(drawn)
    assert result["chance"] == pytest.approx(1 / 3)


def test_bits_per_byte_are_of_all_bytes_together() -> None:
    task = Task("t", (Request("", ("na\xefve",)), Request("", ("ab",))))
    result = task.measure([[-6 * math.log(2)], [-10 * math.log(2)]])
    assert result["bits_per_byte"] == pytest.approx(16 / 8)
    # Deviations from the ratio are -6 and 6 bits.
    assert result["stderr"] == pytest.approx(math.sqrt(72 * 2) / 8)
    assert Task("t", task.requests[:1]).measure([[-1.0]])["stderr"] is None


@given(st.integers(1, 9), st.integers(0, 40), st.integers(1, 12))
def test_windows_score_each_token_once_after_as_many_as_fit(num_known: int, num_scored: int, length: int) -> None:
    ids = list(range(num_known + num_scored))
    rows = list(windows(ids, num_scored, length))
    assert [token for row in rows for token in row.ids[len(row.ids) - row.num_scored :]] == ids[num_known:]
    for row in rows:
        assert 0 < row.num_scored < len(row.ids) <= length + 1
        last = row.ids[-1]
        assert row.ids == tuple(range(max(0, last - length), last + 1))


def test_texts_of_a_run_whose_storage_fails_are_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.toml").write_text('[model]\npreset = "tiny"\n', encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    missing = mock.Mock(side_effect=DataError("there is no such file"))
    monkeypatch.setattr(offline, "open_held_out", missing)
    assert offline.texts_of(tmp_path, tokenizer, frozenset())[0] == "standard library of Python"
    missing.side_effect = StorageError("it does not respond")
    with pytest.raises(StorageError):
        offline.texts_of(tmp_path, tokenizer, frozenset())
