"""LoRA adapters of the frozen linear layers of a model: x W^T + scale (x A^T) B^T.

Model code is unchanged. Parameters are added to existing layers, and their forward methods are replaced. A fused layer
has one adapter for each segment, like the unfused layers of PEFT. The matrix on the side of the unsharded features is
replicated over tp. The other matrix is sharded like the layer's weight. Only activations of width r are communicated:
all-gathered before a sharded B, or all-reduced after a sharded A.

Shapes: S sequence, B batch, I inputs, O outputs, R rank of the adapters, n adapters of one layer.

Source: Hu et al. 2021 (arXiv:2106.09685); Kalajdzievski 2023 (arXiv:2312.03732) for the scale of rsLoRA.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from nxtrain.common.dimensions import adapter_specs, expert_adapter_specs
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.family import CausalLM
from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import Init, Segment
from nxtrain.config.decode import nearest
from nxtrain.config.finetune_schema import FinetuneConfig
from nxtrain.nn.dropout import Dropout, LayerDropout
from nxtrain.parallel.expert_products import LowRank
from nxtrain.parallel.experts import Experts
from nxtrain.parallel.linear import ColumnLinear, RowLinear
from nxtrain.parallel.regions import TensorParallel

A, B = "lora_A", "lora_B"
"""Parameter names of the LoRA matrices in an adapted layer, which are PEFT's module names."""

EXPERT_TARGETS = "experts.gate_up_proj", "experts.down_proj"
"""Adapter targets for the gate-up and down projections of all experts, with PEFT's names of the stacked parameters."""

_SWITCH = "adapter_switch"

_FUSED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Name of the fused layer that computes several layers with the same input, by the name of each of them."""


def is_adapter(parameter: str) -> bool:
    """True if a parameter name belongs to an adapter."""
    return parameter.rpartition(".")[2] in {A, B}


def scale_of(config: FinetuneConfig) -> float:
    """Scale of an adapter's output."""
    if config.rslora:
        return config.alpha / math.sqrt(config.r)
    return config.alpha / config.r


def adapt(
    model: nn.Module,
    config: FinetuneConfig,
    tp: TensorParallel,
    dropout: Dropout | None = None,
    *,
    is_whole: bool = True,
) -> None:
    """Freeze a model, and add LoRA adapters to linear layers of its blocks.

    Args:
        model: A `CausalLM` on the meta device, changed in place; its parameters keep their names.
        config: The section [finetune].
        tp: Tensor parallel context of the layers.
        dropout: Dropout of the adapters' inputs; None without dropout.
        is_whole: The model has all blocks. A pipeline stage may lack layers that the targets name.

    Raises:
        ConfigError: A target is not a linear layer of the blocks of a whole model, or the rank is larger than every
            adapted layer.
    """
    model.requires_grad_(False)
    switch = _Switch()
    setattr(model, _SWITCH, switch)
    names: set[str] = set()
    widest = 0
    paths = {id(module): path for path, module in model.named_modules()}
    blocks = cast(CausalLM, model).blocks
    for layer in chain.from_iterable(block.modules() for block in blocks):
        if isinstance(layer, ColumnLinear | RowLinear):
            names.update(_adapt_layer(layer, paths[id(layer)], config, tp, dropout, switch))
            if A in layer.specs:
                widest = max(widest, *layer.specs["weight"].shape)
        if isinstance(layer, Experts):
            names.update(EXPERT_TARGETS)
            widest = max([widest, *_adapt_experts(layer, config, tp, switch)])
    if is_whole:
        _check(config, names, widest)
    if tp.comm.lazy:
        # torch-xla recomputes a block only if an input of the block has a gradient, and the embedding is frozen.
        blocks[0].register_forward_pre_hook(_require_gradient)


def _check(config: FinetuneConfig, names: set[str], widest: int) -> None:
    """Refuse targets that no layer of a model has, and a rank larger than every adapted layer.

    Args:
        config: The section [finetune].
        names: Names of the layers of the whole model.
        widest: Most features of an adapted layer.
    """
    missing = sorted({*config.targets} - names)
    if missing:
        reason = f"{', '.join(missing)}: no linear layer of the model's blocks has this name"
        raise ConfigError([Problem("finetune.targets", reason, hint=nearest(missing[0], sorted(names)))])
    if config.r > widest:
        reason = f"{config.r:,} is larger than every adapted layer, which have up to {widest:,} features"
        raise ConfigError([Problem("finetune.r", reason, hint=f"use {widest} at most; 8 to 64 are usual")])


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Context in which the adapters of a model are off, so that only its frozen weights compute.

    The results are equal bit for bit to those of the model without adapters.
    """
    switch: _Switch = getattr(model, _SWITCH)
    switch.is_off = True
    try:
        yield
    finally:
        switch.is_off = False


@dataclass
class _Switch:
    """On-off switch of all adapters of a model."""

    is_off: bool = False


def _adapt_layer(
    layer: ColumnLinear | RowLinear,
    path: str,
    config: FinetuneConfig,
    tp: TensorParallel,
    dropout: Dropout | None,
    switch: _Switch,
) -> Sequence[str]:
    """Add the adapters of one layer, and return the names of its segments."""
    spec = layer.specs["weight"]
    names = [path.rpartition(".")[2]]
    if isinstance(layer, ColumnLinear):
        names = [segment.name or names[0] for segment in spec.segments]
    chosen = [index for index, name in enumerate(names) if not config.targets or name in config.targets]
    if not chosen:
        return names
    out_features, in_features = spec.shape
    # The mean square of PEFT's initial A, which is uniform up to 1 / sqrt(I).
    drawn = Init("uniform", 1 / math.sqrt(3 * in_features))
    zeros = Init("zeros")
    methods: dict[str, Callable[..., Any]]
    sequence: Axis | None = None
    if isinstance(layer, ColumnLinear):
        segments = [spec.segments[index] for index in chosen]
        features = range(in_features)
        methods = {"forward": _column_forward, "enter": _column_enter, "product": _column_product}
        if tp.sequence_parallel:
            sequence = tp.axis
    else:
        segments = [Segment("", out_features)]
        first = spec.pieces(tp.axis)[0].start
        features = range(first, first + spec.local_shape(tp.axis)[1])
        methods = {"forward": _row_forward, "product": _row_product, "exit": _row_exit}
    a, b = adapter_specs(spec, segments, config.r, partial_gradient=tp.sequence_parallel)
    with torch.device("meta"):
        for leaf, matrix in ((A, replace(a, init=drawn)), (B, replace(b, init=zeros))):
            layer.specs[leaf] = matrix
            layer.register_parameter(leaf, tp.empty(matrix))
    drop = None
    if dropout is not None:
        prefix, dot, leaf = path.rpartition(".")
        # One mask for all layers that read the same input, so that fused and separate layers drop the same entries.
        drop = dropout.of_layer(f"{prefix}{dot}{_FUSED.get(leaf, leaf)}", features, sequence)
    adapted = cast(Any, layer)
    adapted.adapters = _Adapters(tuple(chosen), config.r, scale_of(config), tp, drop, switch)
    layer.is_uniform = drop is None
    # One function serves all layers, so that a compiler sees equal blocks.
    for name, method in methods.items():
        setattr(adapted, name, MethodType(method, layer))
    return names


def _adapt_experts(experts: Experts, config: FinetuneConfig, tp: TensorParallel, switch: _Switch) -> Sequence[int]:
    """Add the adapters of the expert matrices named in `targets`; return the sizes of the adapted matrices."""
    widths: list[int] = []
    for target, module in zip(EXPERT_TARGETS, (experts.gate_up_proj, experts.down_proj), strict=True):
        if target not in config.targets:
            continue
        a, b = expert_adapter_specs(module.specs["weight"], config.r)
        (_, in_features), (out_features, _) = a.global_shape(a.segments[0]), b.global_shape(b.segments[0])
        widths += [in_features, out_features]
        a = replace(a, init=Init("uniform", 1 / math.sqrt(3 * in_features)))
        with torch.device("meta"):
            for leaf, matrix in ((A, a), (B, replace(b, init=Init("zeros")))):
                module.specs[leaf] = matrix
                module.register_parameter(leaf, tp.empty(matrix))
    if widths:
        experts.updates = partial(_expert_updates, experts, scale_of(config), switch)
    return widths


def _expert_updates(experts: Experts, factor: float, switch: _Switch) -> tuple[LowRank | None, LowRank | None]:
    """Adapter functions of the experts' gate-up and down projections; None without an adapter, or if switched off."""
    updates: list[LowRank | None] = []
    for module in (experts.gate_up_proj, experts.down_proj):
        a, b = getattr(module, A, None), getattr(module, B, None)
        if switch.is_off or a is None or b is None:
            updates.append(None)
            continue
        dim = module.specs[A].dim or 0
        by_expert = a.unflatten(dim, (experts.num_own, -1))
        if dim:
            by_expert = by_expert.transpose(0, 1)
        updates.append(LowRank(by_expert, b.unflatten(0, (experts.num_own, -1)), factor))
    of_gate_up, of_down = updates
    return of_gate_up, of_down


@dataclass(frozen=True)
class _Adapters:
    """LoRA adapters of one layer.

    Args:
        chosen: Indices of the segments with an adapter.
        r: Rank of each adapter.
        scale: Scale of the adapters' output.
        tp: Tensor parallel context of the layer.
        drop: Dropout of the input; None without dropout.
        switch: On-off switch of the model's adapters.
    """

    chosen: tuple[int, ...]
    r: int
    scale: float
    tp: TensorParallel
    drop: LayerDropout | None
    switch: _Switch

    def down(self, x: Tensor, a: Tensor) -> Tensor:
        """Scaled product of the input with A: (..., I) to (..., n R)."""
        if self.drop is not None:
            x = self.drop(x)
        return self.tp.kernels.linear(x, a) * self.scale


def _column_forward(layer: Any, x: Tensor) -> Tensor:
    """Forward pass of a column-parallel layer with adapters: (S/tp, B, I) to (S, B, O/tp)."""
    out = ColumnLinear.forward(layer, x)
    if layer.adapters.switch.is_off:
        return out
    return out + _column_update(layer, out, *_column_enter(layer, x))


def _column_enter(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    """`ColumnLinear.enter` of the adapters: (S/tp, B, I) to (S, B, n R); nothing if the adapters are off."""
    adapters: _Adapters = layer.adapters
    if adapters.switch.is_off:
        return ()
    return (adapters.tp.enter(adapters.down(x, layer.lora_A)),)


def _column_product(layer: Any, x: Tensor, *columns: Tensor) -> Tensor:
    """`ColumnLinear.product` with the adapters' outputs added."""
    out = ColumnLinear.product(layer, x)
    if not columns:
        return out
    return out + _column_update(layer, out, *columns)


def _column_update(layer: Any, out: Tensor, columns: Tensor) -> Tensor:
    """Output of a column-parallel layer's adapters, given the outputs of A: (T, B, n R) to (T, B, O/tp)."""
    adapters: _Adapters = layer.adapters
    parts = columns.split(adapters.r, dim=-1)
    rows = layer.lora_B.split([layer.split_sizes[index] for index in adapters.chosen])
    updates: dict[int, Tensor] = {}
    for index, part, b in zip(adapters.chosen, parts, rows, strict=True):
        updates[index] = adapters.tp.kernels.linear(part, b)
    for index, width in enumerate(layer.split_sizes):
        if index not in updates:
            updates[index] = out.new_zeros(*out.shape[:-1], width)
    if len(updates) == 1:
        return updates[0]
    return torch.cat([updates[index] for index in range(len(updates))], dim=-1)


def _row_forward(layer: Any, x: Tensor) -> Tensor:
    """Forward pass of a row-parallel layer with an adapter: (S, B, I/tp) to (S/tp, B, O)."""
    out, tp = RowLinear.forward(layer, x), layer.adapters.tp
    if layer.adapters.switch.is_off:
        return out
    down = tp.exit(layer.adapters.down(x, layer.lora_A))
    update: Tensor = tp.kernels.linear(down, layer.lora_B)
    return out + update


def _row_product(layer: Any, x: Tensor) -> tuple[Tensor, ...]:
    """`RowLinear.product` with the output of A, which is a partial sum too."""
    if layer.adapters.switch.is_off:
        return RowLinear.product(layer, x)
    return *RowLinear.product(layer, x), layer.adapters.down(x, layer.lora_A)


def _row_exit(layer: Any, out: Tensor, *columns: Tensor) -> Tensor:
    """`RowLinear.exit` with the adapter's output added: (S, B, O), (S, B, R) to (S/tp, B, O)."""
    if not columns:
        return RowLinear.exit(layer, out)
    tp = layer.adapters.tp
    update: Tensor = tp.kernels.linear(tp.exit(*columns), layer.lora_B)
    return RowLinear.exit(layer, out) + update


def _require_gradient(block: nn.Module, inputs: tuple[Any, ...]) -> None:
    if torch.is_grad_enabled():
        inputs[0].requires_grad_()
