"""Parameters sharded over the data parallel ranks and gathered inside of the compiled graph of a step.

A unit is a block, or a layer outside of the blocks. One all-gather makes the parameters of a unit whole before the unit
runs, and one reduce-scatter divides their gradients. Both are operations of the graph, so the compiler can overlap them
with the computation. The backward pass gathers the parameters again, unless `keep_gathered` is set.

The module `fully_sharded` has the same shards and results. There, hooks outside of the graphs gather the parameters.

Source: Zhang et al. 2024, SimpleFSDP (arXiv:2411.00284).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from nxtrain.common.distributed.collectives import Collectives
from nxtrain.common.family import CausalLM
from nxtrain.common.mesh import StateAxes
from nxtrain.common.sharding import Layout
from nxtrain.parallel.data_parallel import DataParallel, pad_rows, take_grad
from nxtrain.parallel.precision import Precision


@dataclass(frozen=True)
class UnitShards:
    """Sharding of the parameters of one unit: a block, or a layer outside of the blocks.

    Args:
        rows: Number of rows of each whole parameter.
        axes: The ranks that share the parameters.
        comm: Collectives.
        precision: Types of computation and reduction.
    """

    rows: tuple[int, ...]
    axes: StateAxes
    comm: Collectives
    precision: Precision


class _GatherUnit(torch.autograd.Function):
    """Autograd function that all-gathers the parameters of an FSDP unit; backward reduce-scatters their gradients."""

    @staticmethod
    def forward(ctx: Any, how: UnitShards, *shards: Tensor) -> tuple[Tensor, ...]:
        ctx.how = how
        ctx.shapes = [shard.shape for shard in shards]
        ctx.dtypes = [shard.dtype for shard in shards]
        flat = torch.cat([shard.to(how.precision.params).reshape(1, -1) for shard in shards], dim=1)
        gathered = how.comm.all_gather(flat, how.axes.shard)
        parts = gathered.split([shard.numel() for shard in shards], dim=1)
        whole = []
        for part, shard, rows in zip(parts, shards, how.rows, strict=True):
            whole.append(part.reshape(-1, *shard.shape[1:])[:rows])
        return tuple(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        how, needed = ctx.how, ctx.needs_input_grad[1:]
        trained = [index for index, is_needed in enumerate(needed) if is_needed]
        shard, dtype = how.axes.shard, how.precision.reduce
        padded = [pad_rows(grads[index].to(dtype), shard.size).reshape(shard.size, -1) for index in trained]
        scale = 1.0 / (shard.size * how.axes.replica.size)
        scattered = how.comm.start_reduce_scatter(torch.cat(padded, dim=1), shard, scale=scale).wait()
        parts = scattered.split([ctx.shapes[index].numel() for index in trained], dim=1)
        of_shards: list[Tensor | None] = [None] * len(needed)
        for index, part in zip(trained, parts, strict=True):
            of_shards[index] = part.reshape(ctx.shapes[index]).to(ctx.dtypes[index])
        return None, *of_shards


class _Method(nn.Module):
    """Module that wraps a method of an FSDP unit, so that `functional_call` can replace parameters for one call."""

    def __init__(self, unit: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.unit, self._function = unit, function

    def forward(self, *inputs: Any) -> Any:
        return self._function(self.unit, *inputs)


@dataclass(frozen=True)
class GraphSharding:
    """Settings for sharding a model inside of its compiled graph.

    Args:
        axes: The ranks that share the parameters.
        comm: Collectives.
        precision: Types of storage, computation and reduction.
        keep_gathered: Units stay whole from the forward pass to their backward pass.
    """

    axes: StateAxes
    comm: Collectives
    precision: Precision
    keep_gathered: bool

    def apply(self, model: nn.Module, fill: Callable[[nn.Module], None]) -> None:
        """Allocate, fill and shard a model that is on the meta device, one unit at a time.

        At most one unit is unsharded at any time.

        Args:
            model: A `CausalLM` of a tensor parallel rank, changed in place; its parameters keep their names.
            fill: Gives storage and values to the parameters of a module that are still on the meta device.
        """
        # torch warns of in-place changes within recomputed parts, but these parts only gather parameters.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
        blocks = cast(CausalLM, model).blocks
        for block in blocks:
            fill(block)
            self._shard(block, {})
        fill(model)
        tied: dict[nn.Parameter, nn.Parameter] = {}
        inside = set(chain.from_iterable(block.modules() for block in blocks))
        for module in model.modules():
            if module not in inside and next(module.parameters(recurse=False), None) is not None:
                self._shard(module, tied)

    def _shard(self, unit: nn.Module, shards: dict[nn.Parameter, nn.Parameter]) -> None:
        """Replace the parameters of an FSDP unit by this rank's rows of them.

        Args:
            unit: Block or layer, changed in place.
            shards: Shards by whole parameter, extended in place; units with a tied parameter share its shard.
        """
        names: list[str] = []
        rows: list[int] = []
        axis = self.axes.shard
        for name, parameter in list(unit.named_parameters()):
            if parameter not in shards:
                own = pad_rows(parameter.detach(), axis.size).chunk(axis.size)[axis.rank].clone()
                shards[parameter] = nn.Parameter(own, requires_grad=parameter.requires_grad)
            path, _, leaf = name.rpartition(".")
            setattr(unit.get_submodule(path), leaf, shards[parameter])
            names.append(name)
            rows.append(parameter.shape[0])
        how = UnitShards(tuple(rows), self.axes, self.comm, self.precision)
        for method in ("forward", "loss", "logits"):
            if hasattr(unit, method):
                setattr(unit, method, self._gathering(unit, getattr(unit, method).__func__, names, how))

    def _gathering(
        self, unit: nn.Module, function: Callable[..., Any], names: Sequence[str], how: UnitShards
    ) -> Callable[..., Any]:
        """Wrap a method of an FSDP unit so that it gathers the unit's parameters first."""
        replaceable = _Method(unit, function)
        inner_names = [f"unit.{name}" for name in names]

        def gathered(*inputs: Any) -> Any:
            shards = [unit.get_parameter(name) for name in names]
            if self.keep_gathered or not torch.compiler.is_compiling() or not torch.is_grad_enabled():
                whole = _GatherUnit.apply(how, *shards)
            else:
                whole = checkpoint(
                    _GatherUnit.apply,
                    how,
                    *shards,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=_recomputed,
                )
            return functional_call(replaceable, dict(zip(inner_names, whole, strict=True)), inputs)

        return gathered


def _recomputed() -> Any:
    """Contexts of activation checkpointing in which the compiler must recompute every result for the backward pass."""
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)


class GatheredInGraph(DataParallel):
    """Data parallelism in which every rank updates its rows of each parameter, and compiled graphs gather the rows.

    Args:
        model: A model that `GraphSharding` has sharded.
        layout: The entries that this rank holds.
        comm: Collectives.
        precision: Types of the sums.
    """

    has_whole_parameters = False

    def __init__(self, model: nn.Module, layout: Layout, comm: Collectives, precision: Precision) -> None:
        self.layout = layout
        self._comm = comm
        self._precision = precision
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.shards = {name: parameter.detach() for name, parameter in self._parameters.items()}

    def begin(self, *, last: bool) -> None:
        """Do nothing, because the graph of every micro-batch reduce-scatters its gradients."""

    def reduce(self) -> dict[str, Tensor]:
        grads = {name: take_grad(parameter) for name, parameter in self._parameters.items()}
        replica = self.layout.mesh.dense.replica
        sums = self._comm.start_all_reduce_bucket(list(grads.values()), replica, self._precision.reduce)
        return dict(zip(grads, sums.wait(), strict=True))

    def publish(self) -> None:
        """Do nothing, because the next forward pass gathers the updated shards."""
