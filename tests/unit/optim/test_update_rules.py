"""Small updates that bf16 rules keep and rounding to nearest loses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.cuda import CudaKernels
from nxtrain.backends.torch_kernels import PlainKernels
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable, ShardSpec
from nxtrain.config.schema import OptimConfig
from nxtrain.optim.adamw import AdamW
from nxtrain.parallel.precision import Update
from tests.support.adamw import host, precision, rounding_to_nearest
from tests.support.models import random

BF16, FP32 = torch.bfloat16, torch.float32
ADAM = OptimConfig(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


def optimizer(param: Tensor, update: Update, state: torch.dtype = FP32, seed: int = 0, **changes: Any) -> AdamW:
    layout = Layout(ParamTable({"w": ShardSpec(tuple(param.shape))}), Mesh.build(1, 0))
    types = precision(param.dtype, update, state)
    optim = ADAM.model_copy(update=changes)
    return AdamW({"w": param}, layout, CpuKernels(), host, precision=types, seed=seed, optim=optim)


def step(adamw: AdamW, grad: Tensor, lr: float) -> None:
    adamw.step({"w": grad.clone()}, torch.tensor(lr), torch.tensor(1.0))


def displacement(update: Update, params: torch.dtype = BF16) -> Tensor:
    """Displacement of weights of order 1 by five updates of 1e-5."""
    start = random(512, 64).to(BF16)
    param = start.to(params, copy=True)
    adamw = optimizer(param, update)
    for index in range(5):
        step(adamw, random(512, 64, seed=1) + 0.1 * random(512, 64, seed=2 + index), lr=1e-5)
    return param.float() - start.float()


def along(actual: Tensor, wanted: Tensor) -> float:
    """Length of one vector along another, in units of the latter."""
    return ((actual * wanted).sum() / wanted.square().sum()).item()


def test_five_updates_of_1e_5_arrive_on_average() -> None:
    wanted = displacement("fp32", FP32)
    assert along(displacement("bf16_stochastic"), wanted) == pytest.approx(1, abs=0.1)
    with rounding_to_nearest():
        assert along(displacement("bf16_stochastic"), wanted) < 0.5


def test_compensated_weights_are_those_of_sixteen_significant_bits() -> None:
    param = random(64, 8).to(BF16)
    wide = param.float()
    adamw, reference = optimizer(param, "bf16_kahan"), optimizer(wide, "fp32")
    for index in range(200):
        for item in (adamw, reference):
            step(item, random(64, 8, seed=1) + random(64, 8, seed=index), lr=1e-4)
    lost = adamw.state["compensation"]["w"]
    assert lost.dtype == BF16
    error = (param.float() + lost.float() - wide).abs() / wide.abs().clamp(min=1e-2)
    assert error.max() < 200 * 2**-16
    assert ((param.float() - wide).abs() <= wide.abs() * 2**-8 + 200 * 2**-16).all(), "the weight is the nearest number"


def mean_squares(update: Update, state: torch.dtype, beta2: float) -> tuple[float, float]:
    """The mean of `exp_avg_sq` after 3000 gradients of deviation 1, and after 3000 more of 0.1."""
    adamw = optimizer(torch.zeros(32, 16, dtype=BF16), update, state, betas=(0.9, beta2))
    generator, result = torch.Generator().manual_seed(0), []
    for scale in (1.0, 0.1):
        for _ in range(3000):
            step(adamw, scale * torch.randn(32, 16, generator=generator), lr=0.0)
        result.append(adamw.state["exp_avg_sq"]["w"].float().mean().item())
    return result[0], result[1]


def test_a_slow_mean_square_in_bf16_freezes_when_rounded_to_nearest_and_only_then() -> None:
    exact = mean_squares("fp32_master", FP32, 0.999)
    assert exact == pytest.approx((0.95, 0.057), rel=0.03)
    frozen = mean_squares("fp32_master", BF16, 0.999)
    assert frozen[1] == frozen[0] > 1.1
    assert mean_squares("bf16_stochastic", BF16, 0.999) == pytest.approx(exact, rel=0.03)
    assert mean_squares("fp32_master", BF16, 0.99) == pytest.approx((1.0, 0.01), rel=0.12)


@pytest.mark.parametrize(("lr", "rows"), [(1e-6, 64), (1e-4, 64), (1e-4, 10), (1e-2, 1)])
def test_lost_updates_are_those_that_rounding_to_nearest_undoes(
    monkeypatch: pytest.MonkeyPatch, lr: float, rows: int
) -> None:
    """Some rows at a time, of which the last may be fewer."""
    monkeypatch.setattr("nxtrain.optim.adamw.MARKED_ENTRIES", 33 * rows)
    param = random(64, 33).to(BF16)
    adamw = optimizer(param, "bf16_stochastic", weight_decay=0.1)
    for index in range(3):
        step(adamw, random(64, 33, seed=index), lr)
    ((name, lost),) = adamw.lost_updates(torch.tensor(lr))
    mean, mean_sq = (adamw.state[kind]["w"].double() for kind in ("exp_avg", "exp_avg_sq"))
    update = (mean / (1 - 0.9**3)) / ((mean_sq / (1 - 0.95**3)).sqrt() + 1e-8) + 0.1 * param.double()
    expected = (param.double() - lr * update).to(BF16) == param
    assert name == "w"
    assert (lost.bool() == expected).float().mean() > 0.999  # a tie may fall otherwise in float32
    assert {1e-6: 0.99, 1e-4: 0.6, 1e-2: 0.0}[lr] <= lost.mean() <= {1e-6: 1.0, 1e-4: 0.99, 1e-2: 0.3}[lr]


def test_updates_of_nothing_are_not_lost() -> None:
    adamw = optimizer(torch.zeros(4, 4, dtype=BF16), "bf16_stochastic")
    step(adamw, torch.zeros(4, 4), lr=1e-3)
    ((_, lost),) = adamw.lost_updates(torch.tensor(1e-3))
    assert lost.sum() == 0


SIZES = {"wide": (4, 33), "square": (9, 9), "experts": (3, 4, 5), "norm": (7,), "longer": (12,)}
SLOW_RULES = [pytest.param(update, marks=pytest.mark.slow) for update in ("fp32_master", "bf16_kahan")]
COMPILED = ParamTable({name: ShardSpec(shape, decay=len(shape) > 1) for name, shape in SIZES.items()})


def updated(kernels: CudaKernels, update: Update) -> dict[str, Tensor]:
    """Parameters and state after three updates."""
    parameters = {n: nn.Parameter(random(*shape, seed=i).to(BF16)) for i, (n, shape) in enumerate(SIZES.items())}
    types = precision(BF16, update, BF16 if update == "bf16_stochastic" else FP32)
    layout = Layout(COMPILED, Mesh.build(1, 0))
    adamw = AdamW(parameters, layout, kernels, host, precision=types, seed=0, optim=OptimConfig())
    for index in range(3):
        grads = {name: random(*shape, seed=10 + index).to(BF16) for name, shape in SIZES.items()}
        adamw.step(grads, torch.tensor(1e-2), torch.tensor(0.5))
    state = {f"{kind} {name}": x for kind, item in adamw.state.items() for name, x in item.items()}
    return {**{name: p.detach() for name, p in parameters.items()}, **state}


class UnfusedKernels(CudaKernels):
    """Operations of the graphs, one after the other."""

    adamw, stochastic_round = PlainKernels.adamw, PlainKernels.stochastic_round


@pytest.mark.parametrize("update", [*SLOW_RULES, "bf16_stochastic"])
def test_compiled_updates_change_no_bit_by_a_graph_for_all_sizes(update: Update) -> None:
    torch._dynamo.reset()
    counters.clear()
    kernels = CudaKernels()
    kernels.compiler = "aot_eager"
    actual, expected = updated(kernels, update), updated(UnfusedKernels(), update)
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name
    assert counters["stats"]["unique_graphs"] == 3  # of vectors, matrices and stacks of matrices
