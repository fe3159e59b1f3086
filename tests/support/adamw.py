"""Fifty updates of a few small parameters, by our AdamW and by torch's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import _muon as torch_muon

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.rounding import step_hash
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Init, Layout, ParamTable, ShardBox, ShardSpec
from nxtrain.config.schema import OptimConfig
from nxtrain.optim.adamw import AdamW
from nxtrain.optim.rounding import rounding_keys
from nxtrain.optim.update_rules import Stochastic
from nxtrain.parallel.precision import Precision, Update
from tests.support.models import random

STEPS = 50
TABLE = ParamTable(
    {"matrix": ShardSpec((9, 5)), "vector": ShardSpec((7,)), "norm": ShardSpec((6,), decay=False, init=Init("ones"))}
)
RULE = OptimConfig(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
LAYOUT = Layout(TABLE, Mesh.build(1, 0))
SCALE = 0.25
"""Factor of every gradient, as clipping gives."""


def precision(params: torch.dtype, update: Update, state: torch.dtype = torch.float32) -> Precision:
    """Types of a run with sums in float32."""
    return Precision(params, accumulate=torch.float32, reduce=torch.float32, update=update, state=state)


def lr_of(step: int) -> float:
    """Changes from step to step, and is 0 in the first, as under a warmup."""
    return 1e-2 * step / STEPS


def grads_of(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients of a step, on the host."""
    return {n: random(*spec.shape, seed=100 * step + i).to(dtype) for i, (n, spec) in enumerate(TABLE.items())}


def first(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Parameters before the first step, on the host."""
    return {n: nn.Parameter(random(*spec.shape, seed=i).to(dtype)) for i, (n, spec) in enumerate(TABLE.items())}


def host(x: Tensor) -> Tensor:
    return x


def ours(
    kernels: Kernels, dtype: torch.dtype, update: Update, put: Callable[[Tensor], Tensor] = host
) -> tuple[AdamW, Mapping[str, nn.Parameter]]:
    """Our optimizer after its steps, and the parameters."""
    parameters = {name: nn.Parameter(put(p.detach())) for name, p in first(dtype).items()}
    optimizer = AdamW(parameters, LAYOUT, kernels, put, precision=precision(dtype, update), seed=0, optim=RULE)
    for step in range(STEPS):
        grads = {name: put(grad) for name, grad in grads_of(step, dtype).items()}
        optimizer.step(grads, put(torch.tensor(lr_of(step))), put(torch.tensor(SCALE)))
    return optimizer, parameters


def torchs(dtype: torch.dtype) -> tuple[torch.optim.AdamW, dict[str, nn.Parameter]]:
    """torch's AdamW on float32 parameters, with gradients that were rounded to `dtype` and scaled by hand."""
    parameters = {name: nn.Parameter(p.detach().float()) for name, p in first(dtype).items()}
    decayed = [p for name, p in parameters.items() if TABLE[name].decay]
    plain = [p for name, p in parameters.items() if not TABLE[name].decay]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    rule: dict[str, Any] = {"betas": RULE.betas, "eps": RULE.eps, "weight_decay": RULE.weight_decay}
    optimizer = torch.optim.AdamW(groups, lr=0.0, foreach=False, **rule)
    for step in range(STEPS):
        for name, grad in grads_of(step, dtype).items():
            parameters[name].grad = grad.float() * SCALE
        for group in optimizer.param_groups:
            group["lr"] = lr_of(step)
        optimizer.step()
    return optimizer, parameters


def part(tensor: Tensor, block: ShardBox) -> Tensor:
    """A block's view into its whole tensor."""
    for dim, (offset, size) in enumerate(zip(block.offsets, block.sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def cut(layout: Layout, whole: Mapping[str, Tensor], shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A rank's part of whole tensors by global name, shaped like its shards; padding is zero."""
    some = next(iter(whole.values()))
    local = {name: torch.zeros(shards[name].shape, dtype=some.dtype) for name in layout}
    for name, blocks in layout.items():
        for block in blocks:
            block.of(local[name]).copy_(part(whole[layout.table[name].global_name(name, block.segment)], block))
    return local


@contextmanager
def rounding_to_nearest() -> Iterator[None]:
    """Round to nearest, the baseline that stochastic rounding must beat."""

    def nearest(self: Stochastic, wide: Tensor, step: Tensor, skip: Tensor | None) -> None:
        self.value.copy_(wide.to(torch.bfloat16))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stochastic, "close", nearest)
        yield


CPU = CpuKernels()


def rounded(
    x: Tensor, step: int = 1, *, seed: int = 0, name: str = "w", kind: str = "param", kernels: Kernels = CPU
) -> Tensor:
    """`x` rounded as the whole of a parameter."""
    layout = Layout(ParamTable({name: ShardSpec(tuple(x.shape))}), Mesh.build(1, 0))
    key = rounding_keys(layout, {name: x}, kind, seed, host)[name]
    out = torch.empty(x.shape, dtype=torch.bfloat16)
    kernels.stochastic_round(x.clone(), out, key, step_hash(torch.tensor(float(step))))
    return out


_CASTS_OF_MUON = ("grad.bfloat16()", "grad.to(dtype=torch.bfloat16, copy=True)")
"""Rounding of the gradient in torch.optim.Muon of torch 2.9 and of 2.15."""


def wide_newton_schulz() -> Callable[..., Tensor]:
    """Iteration of torch.optim.Muon in the type of its argument, where torch's own rounds to bfloat16."""
    source = inspect.getsource(torch_muon._zeropower_via_newtonschulz)
    casts = [cast for cast in _CASTS_OF_MUON if cast in source]
    assert len(casts) == source.count("bfloat16") == 1
    names = dict(vars(torch_muon))
    exec(source.replace(casts[0], "grad.clone()"), names)
    wide: Callable[..., Tensor] = names["_zeropower_via_newtonschulz"]
    return wide
