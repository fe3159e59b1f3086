"""Rotary tables against the definition, as complex numbers in float64, and scaled ones against transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nxtrain.backends.torch_kernels import FusedKernels
from nxtrain.nn import rope as rope_module
from nxtrain.nn.init import materialize
from nxtrain.nn.rope import Rope, frequencies, linear_frequencies, llama3_frequencies, yarn_frequencies
from nxtrain.nn.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling, read_scaling
from tests.support.models import SCALING_TYPES, draw_scaling, random

S, B, N, H = 40, 2, 3, 8
THETA = 10_000.0
LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


def rope_of(scaling: RopeScaling | None = None) -> Rope:
    with torch.device("meta"):
        rope = Rope(S, H, THETA, scaling, FusedKernels())
    materialize(rope, lambda host: host, None)
    return rope


def turned(x: Tensor, sign: float = 1.0) -> Tensor:
    """Dimension i and i + H/2 of position s as one complex number, times exp(i * s * theta^(-2i/H))."""
    freqs = THETA ** (-torch.arange(0, H, 2, dtype=torch.float64) / H)
    angles = sign * torch.arange(len(x), dtype=torch.float64)[:, None, None, None] * freqs
    first, second = x.double().chunk(2, dim=-1)
    number = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([number.real, number.imag], dim=-1)


@pytest.mark.parametrize("length", [S, 7])
def test_positions_turn_by_their_angles_and_gradients_turn_back(length: int) -> None:
    x = random(length, B, N, H).requires_grad_()
    out = rope_of()(x)
    torch.testing.assert_close(out.double(), turned(x.detach()), rtol=0, atol=1e-5)
    grad = random(length, B, N, H, seed=1)
    out.backward(grad)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), turned(grad, sign=-1.0), rtol=0, atol=1e-5)


def test_bf16_is_rounded_once() -> None:
    x = random(S, B, N, H, dtype=torch.bfloat16)
    out = rope_of()(x)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - turned(x)).abs() <= turned(x).abs() * 2**-8 + 2e-5).all()


def test_llama_3_stretches_long_wavelengths_and_keeps_short_ones() -> None:
    """By hand: 64 positions are 1 to 4 turns between wavelengths 64 and 16; outside of that all or nothing."""
    plain, scaled = frequencies(64, THETA).double(), llama3_frequencies(LLAMA3, 64, THETA).double()
    wavelengths = 2 * math.pi / plain
    short, long = wavelengths < 16, wavelengths > 64
    between = ~(short | long)
    assert short.any() and long.any() and between.any()
    assert torch.equal(scaled[short], plain[short])
    torch.testing.assert_close(scaled[long], plain[long] / 8, rtol=1e-6, atol=0)
    kept = (64 / wavelengths[between] - 1.0) / (4.0 - 1.0)
    expected = kept * plain[between] + (1 - kept) * plain[between] / 8
    torch.testing.assert_close(scaled[between], expected, rtol=1e-5, atol=0)


def test_tables_are_computed_on_the_host_whatever_the_default_device() -> None:
    with torch.device("meta"):
        tables = Rope(S, H, THETA, LLAMA3, FusedKernels()).host_buffers()
    assert {table.device.type for table in tables.values()} == {"cpu"}
    assert torch.equal(tables["cos"], rope_of(LLAMA3).cos)


def test_yarn_keeps_dimensions_that_turn_often_and_divides_those_that_turn_seldom() -> None:
    """By hand: of 64 positions, 32 turns are before the first pair; one turn is between pairs 8 and 9 of 32."""
    scaling = YarnScaling(factor=4.0, original_max_position_embeddings=64)
    plain, scaled = frequencies(64, THETA).double(), yarn_frequencies(scaling, 64, THETA).double()
    assert 64 / (2 * math.pi / plain[8]) > 1 > 64 / (2 * math.pi / plain[9])
    share = torch.arange(32).double().div(9).clamp(max=1)
    torch.testing.assert_close(scaled, plain * (1 - share) + plain / 4 * share, rtol=1e-6, atol=0)
    assert scaling.attention_scaling == pytest.approx(1 + 0.1 * math.log(4))


def tables_of_transformers(model: dict[str, Any], head_dim: int, theta: float, seq_len: int) -> dict[str, Tensor]:
    config = transformers.LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, rope_theta=theta, **model
    )
    tables = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(seq_len)[None])
    return {name: table[0, :, : head_dim // 2] for name, table in zip(("cos", "sin"), tables, strict=True)}


def errors_of_tables(rope_type: str, seed: int) -> float:
    """Largest error of drawn tables, relative to the largest entry."""
    rng = Random(f"{rope_type} {seed}")
    seq_len, head_dim, theta = rng.randint(8, 600), 2 * rng.randint(2, 64), rng.choice((100.0, 1e4, 5e5))
    model = draw_scaling(rope_type, rng, seq_len)
    expected = tables_of_transformers({**model, "rope_scaling": dict(model["rope_scaling"])}, head_dim, theta, seq_len)
    scaling = read_scaling(model["rope_scaling"])
    rope = Rope(seq_len, head_dim, theta, scaling, FusedKernels(), original_length=model["max_position_embeddings"])
    ours = rope.host_buffers()
    differences = [(ours[name][:, 0, 0] - table).abs().max() / table.abs().max() for name, table in expected.items()]
    return float(max(differences))


TOLERANCE = 2e-6


@pytest.mark.parametrize("rope_type", SCALING_TYPES)
def test_drawn_tables_are_those_of_transformers(rope_type: str) -> None:
    assert max(errors_of_tables(rope_type, seed) for seed in range(40)) <= TOLERANCE


def test_dynamic_scaling_changes_nothing_up_to_the_original_length() -> None:
    dynamic = read_scaling({"rope_type": "dynamic", "factor": 8.0})
    for original, changes in ((S - 1, True), (S, False), (S + 1, False)):
        tables = Rope(S, H, THETA, dynamic, FusedKernels(), original_length=original).host_buffers()
        assert torch.equal(tables["cos"], rope_of().cos) is not changes


def twice_linear(scaling: LinearScaling, *arguments: Any) -> Tensor:
    return linear_frequencies(scaling, *arguments) / scaling.factor


def yarn_with(**changes: Any) -> Callable[..., Tensor]:
    def frequencies_of(scaling: YarnScaling, *arguments: Any) -> Tensor:
        return yarn_frequencies(scaling.model_copy(update=changes), *arguments)

    return frequencies_of


def twice_yarn(scaling: YarnScaling, *arguments: Any) -> Tensor:
    return yarn_frequencies(scaling.model_copy(update={"factor": scaling.factor**2}), *arguments)


def without_length(scaling: RopeScaling, head_dim: int, theta: float, *lengths: int) -> Tensor:
    return frequencies(head_dim, theta)


MUTANTS: dict[str, tuple[str, object, str, object]] = {
    "attention factor left out": ("yarn", YarnScaling, "attention_scaling", 1.0),
    "truncation ignored": ("yarn", rope_module, "yarn_frequencies", yarn_with(truncate=False)),
    "always truncated": ("yarn", rope_module, "yarn_frequencies", yarn_with(truncate=True)),
    "default turns": ("yarn", rope_module, "yarn_frequencies", yarn_with(beta_fast=None, beta_slow=None)),
    "factor of YaRN applied twice": ("yarn", rope_module, "yarn_frequencies", twice_yarn),
    "factor of positions applied twice": ("linear", rope_module, "linear_frequencies", twice_linear),
    "length ignored": ("dynamic", rope_module, "dynamic_frequencies", without_length),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_of_the_tables_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rope_type, owner, attribute, defect = MUTANTS[name]
    monkeypatch.setattr(owner, attribute, defect)
    assert max(errors_of_tables(rope_type, seed) for seed in range(40)) > 100 * TOLERANCE


@pytest.mark.parametrize("rope_type", ["yarn", "llama3"])
def test_the_original_length_is_not_that_of_the_model(rope_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed_up(self: Rope) -> Tensor:
        assert isinstance(self._scaling, YarnScaling | Llama3Scaling)
        changes = {"original_max_position_embeddings": self._original_length}
        self._scaling = self._scaling.model_copy(update=changes)
        return right(self)

    right = Rope._frequencies
    monkeypatch.setattr(Rope, "_frequencies", mixed_up)
    assert max(errors_of_tables(rope_type, seed) for seed in range(40)) > 100 * TOLERANCE
