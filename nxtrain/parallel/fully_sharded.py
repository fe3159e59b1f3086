"""Parameters, gradients and optimizer state sharded over the data parallel ranks, by torch's `fully_shard`.

Each block's parameters are gathered before the block runs and freed after it. The block's gradients are reduced and
scattered as soon as its backward pass is done, in every micro-batch.

Source: Zhao et al. 2023 (arXiv:2304.11277); torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

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

from nxtrain.family import CausalLM
from nxtrain.parallel.data_parallel import DataParallel
from nxtrain.precision import Precision
from nxtrain.sharding import Layout


@dataclass(frozen=True)
class Sharding:
    """Settings of the sharding of a model.

    Args:
        mesh: The ranks, (shard,) or (replica, shard).
        keep_gathered: Blocks stay whole from the forward pass to their backward pass.
        prefetch: Number of blocks that are gathered ahead of their use; 0: torch's own choice.
        offload: Shards are kept and updated in host memory.
        precision: Types of storage, computation and reduction.
    """

    mesh: DeviceMesh
    keep_gathered: bool
    prefetch: int
    offload: bool
    precision: Precision

    def apply(self, model: nn.Module, fill: Callable[[nn.Module], None]) -> None:
        """Allocate, fill and shard a model on the meta device, block by block, so that at most one block is unsharded.

        Args:
            model: A `CausalLM` of a tensor parallel rank; parameters outside its blocks form one unit.
            fill: Gives storage and values to the parameters of a module that are still on the meta device.
        """
        blocks = cast(CausalLM, model).blocks
        for block in blocks:
            self._shard(block, fill, self.keep_gathered)
        self._shard(model, fill, keep_gathered=True)  # the backward pass begins with the last layers of the forward
        for method in ("run", "loss", "logits"):
            register_fsdp_forward_method(model, method)
        units = [cast(FSDPModule, block) for block in blocks]
        for index, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + self.prefetch])
            unit.set_modules_to_backward_prefetch(units[max(0, index - self.prefetch) : index][::-1])

    def _shard(self, module: nn.Module, fill: Callable[[nn.Module], None], keep_gathered: bool) -> None:
        fill(module)
        dtypes = self.precision
        fully_shard(
            module,
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
