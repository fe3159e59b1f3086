"""Rotary tables against the definition, as complex numbers in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nxtrain.backends.torch_kernels import FusedKernels
from nxtrain.nn.init import materialize
from nxtrain.nn.rope import Rope, RopeStretch, frequencies
from tests.support.models import random

S, B, N, H = 40, 2, 3, 8
THETA = 10_000.0
LLAMA3 = RopeStretch(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=64)


def rope_of(scaling: RopeStretch | None = None) -> Rope:
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
    plain, scaled = frequencies(64, THETA, None).double(), frequencies(64, THETA, LLAMA3).double()
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
