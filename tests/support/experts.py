"""A Llama with experts that every token visits, and the same experts in plain torch: experts without a dispatch.

Ranks gather the tokens of their expert parallel group, and sum the outputs of all experts. Every rule of parameters
that are on some ranks only meets gradients that come from the tokens of other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nxtrain.common.family import BuildContext, ModelConfig, find_family
from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import Init, Segment, ShardSpec
from nxtrain.config.check import Resolved
from nxtrain.parallel.expert_parallel import ExpertParallel
from nxtrain.parallel.regions import TensorParallel
from tests.support.models import hf_model
from tests.support.parity import Course, Pairs, reference


class Matrices(nn.Module):
    """One fused matrix of all experts of a rank."""

    def __init__(self, spec: ShardSpec, tp: TensorParallel) -> None:
        super().__init__()
        self.weight, self.specs = tp.empty(spec), {"weight": spec}

    def of(self, index: int, axis: Axis) -> Tensor:
        """A segment's rows, or its columns."""
        spec = self.specs["weight"]
        piece = spec.pieces(axis)[index]
        return self.weight.narrow(spec.dim or 0, piece.local_start, piece.local_length)


class Experts(nn.Module):
    """Experts of this rank, for the tokens of all ranks of the group."""

    def __init__(self, size: tuple[int, int, int], tp: TensorParallel, exchange: ExpertParallel | None) -> None:
        super().__init__()
        num_experts, hidden, inner = size
        self._tp, self._own, self._ep = tp, range(num_experts), None
        if exchange is not None:
            self._own = exchange.own(num_experts)
            self._ep = TensorParallel(exchange.axis, exchange.comm, tp.kernels, tp.dtype, sequence_parallel=True)
        ups = tuple(Segment(f"{e}.{name}", inner) for e in self._own for name in ("gate_proj", "up_proj"))
        downs = tuple(Segment(f"{e}.down_proj", inner) for e in self._own)
        up = replace(ShardSpec.column(hidden, ups), expert=True)
        down = ShardSpec((hidden, inner * len(downs)), dim=1, segments=downs, expert=True)
        self.gate_up_proj, self.down_proj = Matrices(up, tp), Matrices(down, tp)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """(S, B, D) and (S, B, E) to (S, B, D), a partial sum over tp."""
        if self._ep is not None:
            x, weights = self._ep.enter(x), self._ep.enter(weights)
        axis, outputs = self._tp.axis, []
        for index, expert in enumerate(self._own):
            gate, up = (self.gate_up_proj.of(2 * index + part, axis) for part in (0, 1))
            hidden = F.silu(F.linear(x, gate)) * F.linear(x, up)
            outputs.append(F.linear(hidden, self.down_proj.of(index, axis)) * weights[..., expert, None].to(x.dtype))
        total = torch.stack(outputs).sum(0)
        return total if self._ep is None else self._ep.exit(total)


class SoftExperts(nn.Module):
    """Feed-forward whose experts all compute every token, weighted by a router."""

    def __init__(self, size: tuple[int, int, int], tp: TensorParallel, exchange: ExpertParallel | None) -> None:
        super().__init__()
        self._tp = tp
        router = ShardSpec(size[:2], init=Init("normal", 0.3), partial_gradient=tp.sequence_parallel)
        self.gate = Matrices(router, tp)
        self.experts = Experts(size, tp, exchange)

    def forward(self, x: Tensor) -> Tensor:
        """(S/tp, B, D) to (S/tp, B, D)."""
        weights = F.linear(x, self.gate.weight).float().softmax(-1)
        return self._tp.exit(self.experts(self._tp.enter(x), self._tp.enter(weights)))


_LLAMA = type(find_family("llama"))


@dataclass
class ExpertFamily(_LLAMA):  # type: ignore[valid-type, misc]
    """Llama whose feed-forwards are soft experts."""

    num_experts: int = 4
    inner: int = 7

    def build(self, config: ModelConfig, context: BuildContext) -> nn.Module:
        model = super().build(config, context)
        tp = cast(TensorParallel, cast(Any, context.layers)._parallel)
        size = self.num_experts, config.hidden_size, self.inner
        with torch.device("meta"):
            for block in model.blocks:
                block.mlp = SoftExperts(size, tp, cast(Any, context.layers)._expert_parallel)
        return cast(nn.Module, model)


def with_experts(resolved: Resolved, num_experts: int, inner: int = 7) -> Resolved:
    """The same run of a model with experts."""
    return replace(resolved, family=ExpertFamily(num_experts, inner))


def expert_weights(resolved: Resolved) -> dict[str, Tensor]:
    """Whole weights by global name, in float32."""
    model = _with_plain_experts(hf_model(resolved), cast(ExpertFamily, resolved.family))
    generator = torch.Generator().manual_seed(1)
    weights: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator) * (0.3 if ".gate." in name else 0.1)
        weights[name] = drawn + (1.0 if "norm" in name else 0.0)
    return weights


def expert_reference(resolved: Resolved, steps: int, data: Pairs, weights: Mapping[str, Tensor]) -> Course:
    """transformers' model with plain experts and torch's AdamW in float64, on one process."""
    family = cast(ExpertFamily, resolved.family)

    def wrap(model: nn.Module) -> nn.Module:
        model = _with_plain_experts(model, family).double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
        return model

    dense = dict(hf_model(resolved).named_parameters())
    return reference(resolved, steps, data, {name: weights.get(name, p) for name, p in dense.items()}, wrap)


class _PlainExpert(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class _PlainExperts(nn.Module):
    def __init__(self, num_experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.experts = nn.ModuleList(_PlainExpert(hidden, inner) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return torch.stack([expert(x) * weights[..., e, None] for e, expert in enumerate(self.experts)]).sum(0)


def _with_plain_experts(model: nn.Module, family: ExpertFamily) -> nn.Module:
    layers = cast(Any, model).model.layers
    for layer in layers:
        layer.mlp = _PlainExperts(family.num_experts, layer.mlp.gate_proj.in_features, family.inner)
    return model
