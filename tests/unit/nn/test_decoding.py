"""Incremental decoding gives the scores that the whole text gives, whatever the shape and however the text arrives."""

from __future__ import annotations

import random
from typing import cast

import pytest
import torch

from nxtrain.backends.cpu import CpuBackend
from nxtrain.errors import ConfigError
from nxtrain.family import CausalLM
from nxtrain.mesh import Mesh
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


@pytest.mark.parametrize("params", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("shape", "family"), [*((shape, "llama") for shape in SHAPES), *(("gqa", family) for family in FAMILIES[1:])]
)
def test_scores_are_those_of_the_whole_text(
    monkeypatch: pytest.MonkeyPatch, shape: str, family: str, params: str
) -> None:
    drawn = random.Random(f"{shape} {params}")
    # Small, so that the cache grows and prompts take several chunks.
    monkeypatch.setattr(decoding, "CHUNK", drawn.choice([1, 3, 7, 16]))
    monkeypatch.setattr(decoding, "_FIRST_CAPACITY", drawn.choice([1, 2, 8]))
    model, whole = models(shape, params, family)
    text = [drawn.randrange(128) for _ in range(LENGTH)]
    decoder, length = Decoder(model, lambda x: x), 0
    while length < LENGTH:
        piece = text[length : length + drawn.choice([1, 1, 1, 2, 5, 20])]
        length += len(piece)
        with torch.no_grad():
            expected = whole.logits(torch.tensor([text[:length]]))[0, -1].float()
        found = decoder.scores(piece)
        assert not found.requires_grad, "the cache would keep the graph of all tokens so far"
        assert (found - expected).abs().max() <= TOLERANCE[params] * expected.abs().max(), length


def test_a_further_token_costs_the_same_after_a_long_text() -> None:
    model, _ = models("gqa")
    decoder = Decoder(model, lambda x: x)
    seen: list[int] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[0]))
    decoder.scores(list(range(40)))
    seen.clear()
    decoder.scores([1])
    assert set(seen) == {1}


def test_attention_of_another_kind_is_refused() -> None:
    model, _ = models("gqa")
    del model.blocks[0].self_attn.core  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="attention of their own"):
        Decoder(model, lambda x: x)
