"""Parameters, gradients and optimizer state sharded over the data parallel ranks, by torch's `fully_shard`.

A unit is a block, or adjacent small blocks. A unit's parameters are gathered before the unit runs and freed after it.
The unit's gradients are reduced and scattered as soon as its backward pass is done, in every micro-batch.

Source: Zhao et al. 2023 (arXiv:2304.11277); torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from nxtrain.common.family import CausalLM
from nxtrain.common.sharding import Layout
from nxtrain.common.stages import units_of
from nxtrain.parallel.data_parallel import DataParallel
from nxtrain.parallel.precision import Precision

Backward = Literal["before", "after", "none"]
"""Time at which a backward pass gathers units ahead, next to the gradients of the unit at work."""


@dataclass(frozen=True)
class Prefetch:
    """Units that are gathered ahead of their use.

    Args:
        number: Units; 0: torch's own choice, which is none forward and one backward.
        forward: Forward passes gather ahead.
        backward: Backward passes gather ahead before or after the gradients of the unit at work, or not at all.
    """

    number: int = 1
    forward: bool = True
    backward: Backward = "before"

    def apply(self, units: Sequence[FSDPModule]) -> None:
        """Set what each unit gathers ahead.

        Args:
            units: First module of each unit, in the order of the forward pass.
        """
        for index, unit in enumerate(units):
            if self.forward:
                unit.set_modules_to_forward_prefetch([*units[index + 1 : index + 1 + self.number]])
            before = [*units[max(0, index - self.number) : index][::-1]]
            if self.backward == "before":
                unit.set_modules_to_backward_prefetch(before)
                continue
            unit.set_modules_to_backward_prefetch([unit])  # of no unit at all, torch would gather the one before
            if self.backward == "after" and before:
                # Behind the hook of FSDP, so that the gradient of the input it sees comes before the reduction.
                cast(nn.Module, unit).register_forward_pre_hook(partial(_gather_ahead, before))


def _gather_ahead(units: Sequence[FSDPModule], module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Hook that gathers units once the gradients of a module are computed, and before these are reduced."""

    def gather(grad: Tensor) -> None:
        for unit in units:
            unit.unshard(async_op=True)

    entering = inputs[0]
    if entering.requires_grad:
        entering.register_hook(gather)


@dataclass(frozen=True)
class Sharding:
    """Settings of the sharding of a model.

    Args:
        mesh: The ranks, (shard,) or (replica, shard).
        keep_gathered: Blocks stay whole from the forward pass to their backward pass.
        prefetch: Units that are gathered ahead of their use.
        offload: Shards are kept in host memory.
        precision: Types of storage, computation and reduction.
        unit_params: Fewest parameters of a unit; adjacent blocks of a chunk with fewer share a unit.
        chunks: Number of blocks of each model chunk.
    """

    mesh: DeviceMesh
    keep_gathered: bool
    prefetch: Prefetch
    offload: bool
    precision: Precision
    unit_params: int
    chunks: Sequence[int]

    def apply(self, model: nn.Module, fill: Callable[[nn.Module], None]) -> None:
        """Allocate, fill and shard a model on the meta device, unit by unit, so that at most one unit is unsharded.

        Args:
            model: A `CausalLM` of a tensor parallel rank; parameters outside its blocks form one unit.
            fill: Gives storage and values to the parameters of a module that are still on the meta device.
        """
        blocks = iter(cast(CausalLM, model).blocks)
        units: list[list[nn.Module]] = []
        for number in self.chunks:
            units += self._units(list(islice(blocks, number)))
        for unit in units:
            self._shard(unit, fill, self.keep_gathered)
        self._shard([model], fill, keep_gathered=True)  # the backward pass begins with the last layers of the forward
        for method in ("run", "loss", "logits"):
            register_fsdp_forward_method(model, method)
        self.prefetch.apply([cast(FSDPModule, unit[0]) for unit in units])

    def _units(self, blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
        sizes = []
        for block in blocks:
            sizes.append(sum(parameter.numel() for parameter in block.parameters()))
        units = []
        for indices in units_of(sizes, self.unit_params):
            units.append([blocks[index] for index in indices])
        return units

    def _shard(self, modules: list[nn.Module], fill: Callable[[nn.Module], None], keep_gathered: bool) -> None:
        for module in modules:
            fill(module)
        dtypes = self.precision
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=self.mesh,
            reshard_after_forward=not keep_gathered,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=dtypes.params, reduce_dtype=dtypes.reduce, cast_forward_inputs=False
            ),
            offload_policy=CPUOffloadPolicy(torch.accelerator.is_available()) if self.offload else OffloadPolicy(),
        )


class FullySharded(DataParallel):
    """Data parallelism in which every rank updates its shards of `fully_shard`.

    Args:
        model: A sharded model.
        layout: The entries that this rank holds.
    """

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        self.layout = layout
        self._model = cast(FSDPModule, model)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # the first gathering moves shards that need padding into new storage
                module.unshard()
                module.reshard()
        trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        self._parameters: Mapping[str, DTensor] = {name: cast(DTensor, p) for name, p in trained}
        self.shards = {name: parameter.to_local().detach() for name, parameter in self._parameters.items()}

    def begin(self, *, last: bool) -> None:
        # The shard axis reduces every micro-batch, to keep gradients sharded; the replica axis reduces only their sum.
        self._model.set_requires_all_reduce(last)

    def reduce(self) -> dict[str, Tensor]:
        grads = {name: _local_grad(parameter) for name, parameter in self._parameters.items()}
        for parameter in self._parameters.values():
            parameter.grad = None
        return grads

    def publish(self) -> None:
        """Do nothing: the next forward pass gathers the shards."""


def _local_grad(parameter: DTensor) -> Tensor:
    assert parameter.grad is not None, "every parameter takes part in every step"
    return cast(DTensor, parameter.grad).to_local()
