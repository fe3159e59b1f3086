"""Incremental decoding gives the scores that whole texts give, whatever the shape and however the texts arrive."""

from __future__ import annotations

import random
from typing import cast

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.errors import ConfigError
from nxtrain.common.family import CausalLM
from nxtrain.common.mesh import Mesh
from nxtrain.nn import decoding
from nxtrain.nn.decoding import Decoder
from tests.support.drawn import FAMILIES
from tests.support.models import SHAPES, our_model, plan, weights_of

LENGTH = 60
TOLERANCE = {"fp32": 2e-5, "bf16": 0.1}


def models(shape: str, params: str = "fp32", family: str = "llama") -> tuple[CausalLM, CausalLM]:
    """The same model twice: one that decodes, and one that reads whole texts."""
    resolved = plan(shape, model={"family": family}, train={"seq_len": LENGTH}, precision={"params": params})
    backend, mesh, weights = CpuBackend(), Mesh(1, 0), weights_of(resolved)
    first, second = (our_model(resolved, backend, mesh, weights) for _ in range(2))
    return cast(CausalLM, first), cast(CausalLM, second)


KINDS = [*((shape, "llama") for shape in SHAPES), *(("gqa", family) for family in FAMILIES[1:])]
# Rounded to 16 bits, a router may choose other experts for a token that is read alone.
CASES = [*((*kind, params) for kind in KINDS for params in ("fp32", "bf16")), ("gqa", "gpt_oss", "fp32")]


@pytest.mark.parametrize(("shape", "family", "params"), CASES)
def test_scores_are_those_of_the_whole_text(
    monkeypatch: pytest.MonkeyPatch, shape: str, family: str, params: str
) -> None:
    """Several texts of drawn lengths grow by pieces of drawn lengths, some of them empty."""
    drawn = random.Random(f"{shape} {params}")
    # Small, so that the cache grows and prompts take several chunks.
    monkeypatch.setattr(decoding, "CHUNK", drawn.choice([1, 3, 7, 16]))
    monkeypatch.setattr(decoding, "_FIRST_CAPACITY", drawn.choice([1, 2, 8]))
    model, whole = models(shape, params, family)
    decoder = Decoder(model, lambda x: x)
    for num_texts in (1, drawn.choice([2, 3, 4])):
        texts = [[drawn.randrange(128) for _ in range(drawn.randint(1, LENGTH))] for _ in range(num_texts)]
        decoder.begin(num_texts)
        read = [0] * num_texts
        while any(done < len(text) for done, text in zip(read, texts, strict=True)):
            sizes = [drawn.choice([0, 1, 1, 1, 2, 5, 20]) for _ in texts]
            pieces = [text[done : done + size] for text, done, size in zip(texts, read, sizes, strict=True)]
            if not any(pieces):
                continue
            read = [done + len(piece) for done, piece in zip(read, pieces, strict=True)]
            actual = decoder.scores(pieces)
            assert not actual.requires_grad, "the cache would keep the graph of all tokens so far"
            for text, done, piece, row in zip(texts, read, pieces, actual, strict=True):
                with torch.no_grad():
                    expected = whole.logits(torch.tensor([text[:done]]))[0, -1].float() if piece else torch.zeros(1)
                assert (row - expected).abs().max() <= TOLERANCE[params] * expected.abs().max(), (done, sizes)


def test_padding_reaches_no_score() -> None:
    """Other neighbours, and other contents of the cache before, change no score by a bit."""
    model, _ = models("gqa")
    decoder = Decoder(model, lambda x: x)
    results = []
    for other in (list(range(1, 40)), [5], [120] * 23):
        decoder.begin(2)
        first = decoder.scores([[1, 2, 3], other[:39]])[0]
        results.append((first, decoder.scores([[4], other[-1:]])[0], decoder.scores([[7, 8], ()])[0]))
    for scores in zip(*results, strict=True):
        # Rows of one matrix may be summed in another order beside more rows.
        assert all(torch.allclose(scores[0], score, rtol=0, atol=2e-6) for score in scores)


def test_a_further_token_costs_the_same_after_a_long_text() -> None:
    model, _ = models("gqa")
    decoder = Decoder(model, lambda x: x)
    costs = []
    for length in (1, 30, 57):
        decoder.begin(2)
        decoder.scores([[3] * length, [4]])
        with FlopCounterMode(display=False) as counter:
            decoder.scores([[1], [2]])
        costs.append(counter.get_total_flops())
    assert costs[0] == costs[1] == costs[2] > 0


def test_reading_keeps_nothing_for_a_backward_pass() -> None:
    model, _ = models("gqa")
    decoder = Decoder(model, lambda x: x)
    decoder.begin(1)
    kept: list[torch.Tensor] = []
    assert any(p.requires_grad for p in cast(torch.nn.Module, model).parameters())
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda index: index):
        for _ in decoder.read([[1, 2, 3]], 2):
            assert not kept


def test_attention_of_another_kind_is_refused() -> None:
    model, _ = models("gqa")
    del model.blocks[0].self_attn.core  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="attention of their own"):
        Decoder(model, lambda x: x)
