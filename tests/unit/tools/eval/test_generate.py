"""Draws follow scores, temperature and number of choices; streamed text splits no character and ends before a stop."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from nxtrain.common.errors import DivergedError
from nxtrain.data.tokenization import train_bpe
from nxtrain.tools.eval.generate import Continuation, Detokenizer, Sampling, Stops


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(
        ["na\xefve caf\xe9 \u2014 \u4f60\u597d, \u4e16\u754c \U0001f642 " * 50, "the quick brown fox " * 50], 300, path
    )
    return Tokenizer.from_file(str(path))


@given(text=st.text(max_size=40), noise=st.lists(st.integers(1, 299), max_size=30))
def test_pieces_make_the_whole_text(tokenizer: Tokenizer, text: str, noise: list[int]) -> None:
    ids = [*tokenizer.encode(text).ids, *noise, *tokenizer.encode("\xe9\U0001f642").ids]
    stream = Detokenizer(tokenizer)
    pieces = [stream.add([token]) for token in ids]
    assert "".join([*pieces, stream.rest()]) == tokenizer.decode(ids)
    if not noise:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces) or "\N{REPLACEMENT CHARACTER}" in text


def test_a_character_of_several_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0001f680").ids  # not among the merges
    assert len(ids) > 1
    stream = Detokenizer(tokenizer)
    assert [stream.add([token]) for token in ids] == [""] * (len(ids) - 1) + ["\U0001f680"]


@given(prompt=st.text(st.sampled_from("a\xe9\U0001f680\N{REPLACEMENT CHARACTER}"), min_size=1, max_size=4))
def test_no_part_of_a_prompt_is_taken_for_added_text(tokenizer: Tokenizer, prompt: str) -> None:
    text = Continuation(tokenizer.encode(prompt).ids, 9, tokenizer, stops=(prompt[0],))
    assert text.prompt == prompt
    for token in tokenizer.encode("the fox").ids:
        text.add(token)
    assert (text.text, text.ending) == ("the fox", "")


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(1, 4), min_size=1, max_size=30),
)
def test_the_text_ends_before_the_first_stop(text: str, stops: list[str], cuts: list[int]) -> None:
    stream, shown, start = Stops(stops), "", 0
    while start < len(text) and not stream.has_ended:
        end = start + cuts[start % len(cuts)]
        shown += stream.add(text[start:end])
        result = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        assert text.startswith(shown)
        assert stream.has_ended == bool(result)
        if result:
            assert shown == text[: min(result)]
        start = end
    if not stream.has_ended:
        assert shown + stream.rest() == text


def draws(sampling: Sampling, scores: torch.Tensor, count: int = 300) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {sampling.draw(scores, generator) for _ in range(count)}


SCORES = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.1]))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0, 0, 1.0), {0, 1, 2, 3}),
        (Sampling(1.0, 2, 1.0), {0, 1}),
        (Sampling(1.0, 0, 0.5), {0}),
        (Sampling(1.0, 0, 0.51), {0, 1}),
        (Sampling(1.0, 0, 0.76), {0, 1, 2}),
        (Sampling(1.0, 0, 1e-6), {0}),
        (Sampling(1.0, 3, 0.99), {0, 1, 2}),
        (Sampling(0.0, 0, 1.0), {0}),
        (Sampling(1e-300, 0, 1.0), {0}),
        (Sampling(5e-324, 50, 1.0), {0}),
        (Sampling(1e9, 2**62, 1.0), {0, 1, 2, 3}),
    ],
)
def test_tokens_come_from_those_that_may_be_chosen(sampling: Sampling, expected: set[int]) -> None:
    assert draws(sampling, SCORES) == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_scores_that_are_not_finite_are_refused(bad: float, temperature: float) -> None:
    with pytest.raises(DivergedError, match="not finite"):
        draws(Sampling(temperature), torch.tensor([0.0, bad]), 1)


@pytest.mark.parametrize("seed", range(40))
def test_chances_of_a_draw_are_those_of_transformers_logits_processors(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Temperature first, then top_k, then top_p, as `generate` of transformers orders them."""
    from transformers.generation import logits_process

    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    size = rng.randint(2, 400)
    scores = torch.randn(size, generator=generator) * rng.choice((0.1, 1.0, 5.0))
    assert scores.unique().numel() == size, "transformers keeps more than top_k of equal scores"
    temperature = rng.choice((0.3, 0.8, 1.0, 2.5))
    top_k = rng.choice((0, 1, rng.randint(1, size), size + 7))
    top_p = rng.choice((1e-6, rng.uniform(0.05, 0.99), 1.0))
    processors = logits_process.LogitsProcessorList([logits_process.TemperatureLogitsWarper(temperature)])
    if top_k:
        processors.append(logits_process.TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(logits_process.TopPLogitsWarper(top_p))
    wanted = processors(torch.zeros(1, 1, dtype=torch.int64), scores.double()[None])[0].softmax(0)
    actual = torch.zeros(size, dtype=torch.float64)
    sampling = Sampling(temperature, top_k, top_p)
    places, shares = list(range(min(top_k or size, size))), list[float]()

    def draw(chances: torch.Tensor, count: int, *, generator: torch.Generator) -> torch.Tensor:
        position = places[len(shares)]
        shares.append(float(chances[position] / chances.sum()))
        return torch.tensor([position])

    monkeypatch.setattr(torch, "multinomial", draw)
    for _ in places:
        token = sampling.draw(scores, generator)
        actual[token] = shares[-1]
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-15)
    assert bool(((actual > 0) == (wanted > 0)).all())
