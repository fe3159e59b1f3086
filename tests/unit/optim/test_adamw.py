"""Fifty updates are those of torch.optim.AdamW, with either arithmetic and either rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nxtrain.backends.base import Kernels
from nxtrain.backends.kernels import FusedKernels, PlainKernels
from nxtrain.optim.adamw import AdamW, Update
from nxtrain.sharding import Init, ParamTable, ShardSpec
from tests.support.layers import random

STEPS = 50
KERNELS = {"fused": FusedKernels(grouped_attention=False), "plain": PlainKernels()}
EVERY = pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
TABLE = ParamTable(
    {"matrix": ShardSpec((9, 5)), "vector": ShardSpec((7,)), "norm": ShardSpec((6,), decay=False, init=Init("ones"))}
)
RULE: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SCALE = 0.25


def lr_of(step: int) -> float:
    """Changes from step to step, and is 0 in the first, as under a warmup."""
    return 1e-2 * step / STEPS


def grads_of(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {n: random(*spec.shape, seed=100 * step + i).to(dtype) for i, (n, spec) in enumerate(TABLE.items())}


def first(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    return {n: nn.Parameter(random(*spec.shape, seed=i).to(dtype)) for i, (n, spec) in enumerate(TABLE.items())}


def ours(kernels: Kernels, dtype: torch.dtype, update: Update) -> tuple[AdamW, Mapping[str, nn.Parameter]]:
    parameters = first(dtype)
    optimizer = AdamW(parameters, TABLE, kernels, lambda host: host, update=update, **RULE)
    for step in range(STEPS):
        optimizer.step(grads_of(step, dtype), torch.tensor(lr_of(step)), torch.tensor(SCALE))
    return optimizer, parameters


def torchs(dtype: torch.dtype) -> tuple[torch.optim.AdamW, dict[str, nn.Parameter]]:
    """torch's AdamW on float32 parameters, with gradients that were rounded to `dtype` and scaled by hand."""
    parameters = {name: nn.Parameter(p.detach().float()) for name, p in first(dtype).items()}
    decayed = [p for name, p in parameters.items() if TABLE[name].decay]
    plain = [p for name, p in parameters.items() if not TABLE[name].decay]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, foreach=False, **RULE)
    for step in range(STEPS):
        for name, grad in grads_of(step, dtype).items():
            parameters[name].grad = grad.float() * SCALE
        for group in optimizer.param_groups:
            group["lr"] = lr_of(step)
        optimizer.step()
    return optimizer, parameters


@EVERY
def test_fp32_parameters_and_moments_equal_torch(kernels: Kernels) -> None:
    optimizer, parameters = ours(kernels, torch.float32, "fp32")
    reference, expected = torchs(torch.float32)
    assert optimizer.num_updates.tolist() == [STEPS, STEPS]
    for name, parameter in expected.items():
        torch.testing.assert_close(parameters[name], parameter, rtol=2e-6, atol=1e-6)
        for moment in ("exp_avg", "exp_avg_sq"):
            theirs = reference.state[parameter][moment]
            torch.testing.assert_close(optimizer.state[moment][name], theirs, rtol=2e-6, atol=1e-7)


@EVERY
def test_fp32_masters_of_bf16_parameters_equal_torch_and_are_rounded_to_nearest(kernels: Kernels) -> None:
    optimizer, parameters = ours(kernels, torch.bfloat16, "fp32_master")
    _, expected = torchs(torch.bfloat16)
    for name, parameter in expected.items():
        master = optimizer.state["master"][name]
        assert master.dtype == torch.float32
        torch.testing.assert_close(master, parameter.detach(), rtol=2e-6, atol=1e-6)
        assert torch.equal(parameters[name].detach(), master.to(torch.bfloat16))


def test_masters_keep_updates_that_bf16_would_lose() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    table = ParamTable({"w": ShardSpec((4,))})
    kernels = KERNELS["fused"]
    rule: dict[str, Any] = {**RULE, "weight_decay": 0.0}
    optimizer = AdamW({"w": parameter}, table, kernels, lambda host: host, update="fp32_master", **rule)
    for _ in range(16):  # each update is the learning rate, a quarter of the distance to the next smaller bf16 number
        grads = {"w": torch.ones(4, dtype=torch.bfloat16)}
        optimizer.step(grads, torch.tensor(2.0**-10), torch.tensor(1.0))
    torch.testing.assert_close(optimizer.state["master"]["w"], torch.full((4,), 1 - 16 * 2.0**-10), rtol=0, atol=1e-5)
    assert torch.equal(parameter.detach().float(), torch.full((4,), 1 - 2.0**-6))


@EVERY
def test_a_rate_of_zero_changes_no_parameter(kernels: Kernels) -> None:
    parameters = first(torch.float32)
    optimizer = AdamW(parameters, TABLE, kernels, lambda host: host, update="fp32", **RULE)
    optimizer.step(grads_of(0, torch.float32), torch.tensor(0.0), torch.tensor(1.0))
    assert all(torch.equal(parameters[name], p) for name, p in first(torch.float32).items())
