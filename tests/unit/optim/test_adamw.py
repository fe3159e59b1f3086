"""Fifty updates are those of torch.optim.AdamW, with either arithmetic and either rule."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.torch_kernels import FusedKernels, PlainKernels
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable, ShardSpec
from nxtrain.optim.adamw import AdamW
from nxtrain.parallel.precision import Update
from tests.support.adamw import LAYOUT, RULE, STEPS, first, grads_of, host, ours, precision, torchs

KERNELS = {
    "fused": FusedKernels(),
    "tiled": CpuKernels(),
    "plain": PlainKernels(),
}
EVERY = pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)


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
    layout = Layout(ParamTable({"w": ShardSpec((4,))}), Mesh.build(1, 0))
    kernels = KERNELS["fused"]
    rule = RULE.model_copy(update={"weight_decay": 0.0})
    optimizer = AdamW(
        {"w": parameter}, layout, kernels, host, precision=precision(torch.bfloat16, "fp32_master"), seed=0, optim=rule
    )
    for _ in range(16):  # each update is the learning rate, a quarter of the distance to the next smaller bf16 number
        grads = {"w": torch.ones(4, dtype=torch.bfloat16)}
        optimizer.step(grads, torch.tensor(2.0**-10), torch.tensor(1.0))
    torch.testing.assert_close(optimizer.state["master"]["w"], torch.full((4,), 1 - 16 * 2.0**-10), rtol=0, atol=1e-5)
    assert torch.equal(parameter.detach().float(), torch.full((4,), 1 - 2.0**-6))


@EVERY
@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999), (0.99, 0.9999), (0.0, 0.0)])
def test_the_first_updates_are_exact_whatever_the_decay(kernels: Kernels, betas: tuple[float, float]) -> None:
    """From weights of zero, so that no digit of an update is lost; against the formula in float64."""
    rule = RULE.model_copy(update={"weight_decay": 0.0, "betas": betas, "eps": 1e-12})
    layout = Layout(ParamTable({"w": ShardSpec((16,))}), Mesh.build(1, 0))
    before = torch.zeros(16)
    parameter = nn.Parameter(torch.zeros(16))
    optimizer = AdamW(
        {"w": parameter}, layout, kernels, host, precision=precision(torch.float32, "fp32"), seed=0, optim=rule
    )
    mean, mean_sq = torch.zeros(16).double(), torch.zeros(16).double()
    for step in range(1, 5):
        grad = torch.randn(16, generator=torch.Generator().manual_seed(step))
        optimizer.step({"w": grad.clone()}, torch.tensor(1.0), torch.tensor(1.0))
        mean = betas[0] * mean + (1 - betas[0]) * grad.double()
        mean_sq = betas[1] * mean_sq + (1 - betas[1]) * grad.double().square()
        update = mean / (1 - betas[0] ** step) / ((mean_sq / (1 - betas[1] ** step)).sqrt() + 1e-12)
        torch.testing.assert_close(before - parameter.detach(), update.float(), rtol=0, atol=2e-6)
        before = parameter.detach().clone()


@EVERY
def test_a_rate_of_zero_changes_no_parameter(kernels: Kernels) -> None:
    parameters = first(torch.float32)
    optimizer = AdamW(parameters, LAYOUT, kernels, host, precision=precision(torch.float32, "fp32"), seed=0, optim=RULE)
    optimizer.step(grads_of(0, torch.float32), torch.tensor(0.0), torch.tensor(1.0))
    assert all(torch.equal(parameters[name], p) for name, p in first(torch.float32).items())


def mean_of_the_first(decay: float) -> Callable[[Tensor, Tensor, Tensor | int], Tensor]:
    """Average by torch's rule, with a decay that is smaller as long as it leaves the first weights too much."""

    def average(mean: Tensor, weights: Tensor, num_averaged: Tensor | int) -> Tensor:
        count = float(num_averaged)
        result: Tensor = get_ema_avg_fn(min(decay, count / (count + 1.0)))(mean, weights, num_averaged)
        return result

    return average


@EVERY
@pytest.mark.parametrize("update", ["fp32", "fp32_master"])
@pytest.mark.parametrize("decay", [0.5, 0.9, 0.9999])
def test_the_mean_of_the_weights_is_that_of_torch(kernels: Kernels, update: Update, decay: float) -> None:
    """0.5 is torch's own rule from the second step on; 0.9999 is the plain mean of so few steps."""
    params = torch.float32 if update == "fp32" else torch.bfloat16
    rule = RULE.model_copy(update={"ema_decay": decay})
    parameters = {name: p.detach() for name, p in first(params).items()}
    optimizer = AdamW(parameters, LAYOUT, kernels, host, precision=precision(params, update), seed=0, optim=rule)
    plain = get_ema_avg_fn(0.5) if decay == 0.5 else mean_of_the_first(decay)
    weights = nn.ParameterDict({name: torch.zeros(p.shape) for name, p in parameters.items()})
    theirs, seen = AveragedModel(weights, avg_fn=plain), []
    for step in range(STEPS):
        optimizer.step(grads_of(step, params), torch.tensor(1e-2), torch.tensor(1.0))
        for name, parameter in weights.items():
            parameter.data.copy_(optimizer.state.get("master", parameters)[name])
        theirs.update_parameters(weights)
        seen.append(weights["matrix"].detach().clone())
    expected = dict(theirs.module.named_parameters())
    for name, mean in optimizer.state["ema"].items():
        assert mean.dtype == torch.float32
        torch.testing.assert_close(mean, expected[name].detach(), rtol=1e-6, atol=1e-7)
    if decay == 0.9999:
        torch.testing.assert_close(optimizer.state["ema"]["matrix"], torch.stack(seen).mean(0), rtol=1e-5, atol=1e-6)


def test_no_key_means_no_mean_and_new_weights_a_new_one() -> None:
    assert "ema" not in ours(KERNELS["plain"], torch.float32, "fp32")[0].state
    weights = {name: p.detach() for name, p in first(torch.bfloat16).items()}
    rule = RULE.model_copy(update={"ema_decay": 0.9})
    types = precision(torch.bfloat16, "fp32_master")
    optimizer = AdamW(weights, LAYOUT, KERNELS["plain"], host, precision=types, seed=0, optim=rule)
    assert all(torch.equal(mean, weights[name].float()) for name, mean in optimizer.state["ema"].items())
    for parameter in weights.values():
        parameter.add_(1.0)
    assert not torch.equal(optimizer.state["ema"]["matrix"], weights["matrix"].float())
    optimizer.reset()
    assert all(torch.equal(mean, weights[name].float()) for name, mean in optimizer.state["ema"].items())
