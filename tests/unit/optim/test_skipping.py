"""An update that is skipped changes no bit of parameters and state, whatever the rule, the kernels and the gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.torch_kernels import FusedKernels, PlainKernels
from nxtrain.common.kernels import Kernels
from nxtrain.optim.adamw import AdamW
from nxtrain.parallel.precision import Update
from tests.support.adamw import LAYOUT, RULE, SCALE, first, grads_of, host, precision

RULES: list[tuple[Update, torch.dtype, torch.dtype]] = [
    ("fp32", torch.float32, torch.float32),
    ("fp32_master", torch.bfloat16, torch.float32),
    ("bf16_stochastic", torch.bfloat16, torch.float32),
    ("bf16_stochastic", torch.bfloat16, torch.bfloat16),
    ("bf16_kahan", torch.bfloat16, torch.float32),
    ("bf16_kahan", torch.bfloat16, torch.bfloat16),
]
KERNELS = {"cpu": CpuKernels, "fused": FusedKernels, "plain": PlainKernels}
"""`fused` are those of a GPU, whose host must not look, run on the CPU; `plain` those of PyTorch/XLA."""


def optimizer(
    kernels: Kernels, update: Update, params: torch.dtype, state: torch.dtype
) -> tuple[AdamW, dict[str, Tensor]]:
    shards = {name: p.detach() for name, p in first(params).items()}
    types, rule = precision(params, update, state), RULE.model_copy(update={"ema_decay": 0.9})
    return AdamW(shards, LAYOUT, kernels, host, precision=types, seed=0, optim=rule), shards


def step(adamw: AdamW, grads: dict[str, Tensor], scale: float, skip: bool | None) -> None:
    skipped = None if skip is None else torch.tensor(skip)
    adamw.step(grads, torch.tensor(1e-2), torch.tensor(scale), skipped)


def held(adamw: AdamW, shards: dict[str, Tensor]) -> dict[str, Tensor]:
    kinds = {"param": shards, **adamw.state}
    bits = {2: torch.int16, 4: torch.int32}
    return {
        f"{kind} {name}": x.view(bits[x.dtype.itemsize]).clone() for kind, xs in kinds.items() for name, x in xs.items()
    }


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("update", "params", "state"), RULES)
def test_a_skipped_step_leaves_every_bit_and_counts(
    kernels: str, update: Update, params: torch.dtype, state: torch.dtype
) -> None:
    adamw, shards = optimizer(KERNELS[kernels](), update, params, state)
    for index in range(5):
        step(adamw, grads_of(index, params), SCALE, skip=False)
    if update == "bf16_kahan":  # a residue of half a unit in the last place, and one that a float32 sum would lose
        shards["vector"][:2] = torch.tensor([1.0078125, 1.0])
        adamw.state["compensation"]["vector"][:2] = torch.tensor([2.0**-8, 2.0**-40])
    adamw.state["exp_avg"]["vector"][2] = -0.0
    before = held(adamw, shards)
    for bad in (float("nan"), float("inf")):
        grads = grads_of(7, params)
        grads["matrix"][3, 2] = bad
        step(adamw, grads, float("nan"), skip=True)
        after = held(adamw, shards)
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert adamw.num_updates.tolist() == [7, 7]
    step(adamw, grads_of(8, params), SCALE, skip=False)
    assert all(x.isfinite().all() for x in shards.values())
    assert not torch.equal(held(adamw, shards)["param matrix"], before["param matrix"])


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("update", "params", "state"), RULES)
def test_a_step_that_is_not_skipped_is_what_it_was(
    kernels: str, update: Update, params: torch.dtype, state: torch.dtype
) -> None:
    results = []
    for skip in (None, False):
        adamw, shards = optimizer(KERNELS[kernels](), update, params, state)
        for index in range(5):
            step(adamw, grads_of(index, params), SCALE, skip)
        results.append(held(adamw, shards))
    plain, asked = results
    assert [name for name in plain if not torch.equal(plain[name], asked[name])] == []
