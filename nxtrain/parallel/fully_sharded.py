"""Parameters, gradients and optimizer state sharded over the data parallel ranks by torch's `fully_shard` (FSDP2).

A unit is the group of parameters that one all-gather collects. It is a block, several adjacent small blocks, the
embedding, or the output projection. A unit's parameters are gathered before the unit runs and freed after it. A unit's
gradients are reduce-scattered as soon as its backward pass is done, in every micro-batch. Other parameters outside the
blocks form the last unit: the final norm, and a matrix that is both embedding and output projection. Under expert
parallelism the experts of a block are a separate unit, sharded over the ranks that hold the same experts.

Source: Zhao et al. 2023 (arXiv:2304.11277); torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
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
from nxtrain.common.sharding import Layout, ParamTable
from nxtrain.common.stages import units_of
from nxtrain.parallel.data_parallel import DataParallel
from nxtrain.parallel.embedding import VocabEmbedding
from nxtrain.parallel.loss import VocabHead
from nxtrain.parallel.precision import Precision

Backward = Literal["before", "after", "none"]
"""Time at which a backward pass prefetches FSDP units: before or after the current unit's gradients, or never."""


@dataclass(frozen=True)
class Prefetch:
    """Prefetch of FSDP units: their parameters are gathered before they are needed.

    Args:
        number: Number of units that are prefetched; 0 for torch's default, which is none in forward and one in
            backward.
        forward: Forward passes prefetch.
        backward: Backward passes prefetch before or after the gradients of the current unit, or not at all.
    """

    number: int = 1
    forward: bool = True
    backward: Backward = "before"

    def apply(
        self, units: Sequence[Sequence[FSDPModule]], embedding: FSDPModule | None, head: FSDPModule | None
    ) -> None:
        """Register the FSDP units that each unit prefetches.

        Args:
            units: First module of each unit of blocks, followed by its experts that are units of their own, in forward
                order. The experts are gathered with the unit.
            embedding, head: Units before and after the blocks; None if their parameters belong to the unit of the
                model.
        """
        following = [*units] if head is None else [*units, [head]]
        if self.forward and embedding is not None:
            embedding.set_modules_to_forward_prefetch([*chain(*following[: self.number])])
        if head is not None:
            # The gradient of the projection is ready before the backward pass, so gathering ahead delays nothing.
            last = [*chain(*units[-max(1, self.number) :][::-1])]
            head.set_modules_to_backward_prefetch([head] if self.backward == "none" else last)
        for index, (unit, *experts) in enumerate(units):
            if self.forward:
                ahead = following[index + 1 : index + 1 + self.number]
                unit.set_modules_to_forward_prefetch([*experts, *chain(*ahead)])
            before = [*chain(*units[max(0, index - max(1, self.number)) : index][::-1])]
            for of_experts in experts:
                of_experts.set_modules_to_backward_prefetch([of_experts])
            if self.backward == "before" and before:
                # The unit's own experts are not listed, since torch would gather the list again for the routing, the
                # second output of a block: its gradient comes after the experts' gradients.
                unit.set_modules_to_backward_prefetch(before)
                continue
            unit.set_modules_to_backward_prefetch([unit])  # with an empty list, torch would prefetch the unit before
            if self.backward == "after" and before:
                # Registered after FSDP's hook, so that the gathers start before FSDP reduces the gradients.
                cast(nn.Module, unit).register_forward_pre_hook(partial(_gather_ahead, before))


def _gather_ahead(units: Sequence[FSDPModule], module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Forward pre-hook that prefetches FSDP units in backward, between a module's gradients and their reduction.

    The prefetch starts when the gradient of the module's input is computed.
    """

    def gather(grad: Tensor) -> None:
        for unit in units:
            unit.unshard(async_op=True)

    entering = inputs[0]
    if entering.requires_grad:
        entering.register_hook(gather)


@dataclass(frozen=True)
class Sharding:
    """Settings of `fully_shard` for a model.

    Args:
        mesh: Device mesh of the data parallel ranks, (shard,) or (replica, shard).
        keep_gathered: Parameters of blocks stay gathered from the forward pass to the backward pass.
        prefetch: Prefetch of units.
        offload: Shards are kept in host memory.
        precision: Types of storage, computation and reduction.
        unit_params: Fewest parameters of a unit; adjacent smaller blocks of a chunk share a unit.
        chunks: Number of blocks of each model chunk.
        expert_mesh: Device mesh of the ranks that hold the same experts, shaped like `mesh`; None if all ranks hold all
            experts.
    """

    mesh: DeviceMesh
    keep_gathered: bool
    prefetch: Prefetch
    offload: bool
    precision: Precision
    unit_params: int
    chunks: Sequence[int]
    expert_mesh: DeviceMesh | None = None

    def apply(self, model: nn.Module, fill: Callable[[nn.Module], None]) -> None:
        """Allocate, fill and shard a model that is on the meta device, one unit at a time.

        At most one unit is unsharded at any time.

        Args:
            model: A `CausalLM` of a tensor parallel rank.
            fill: Gives storage and values to the parameters of a module that are still on the meta device.
        """
        blocks = iter(cast(CausalLM, model).blocks)
        units: list[list[nn.Module]] = []
        for number in self.chunks:
            units += self._units(list(islice(blocks, number)))
        embedding, head = embedding_and_head(model)
        if embedding is not None:
            self._shard([embedding], fill, self.mesh, keep_gathered=False)
            # The gradient of a lookup needs no weights.
            cast(FSDPModule, embedding).set_unshard_in_backward(False)
        gathered: list[list[FSDPModule]] = []
        for unit in units:
            experts = self._shard_experts(unit, fill)
            self._shard(unit, fill, self.mesh, self.keep_gathered)
            gathered.append([cast(FSDPModule, module) for module in (unit[0], *experts)])
        # The backward pass begins with the last layers of the forward pass.
        if head is not None:
            self._shard([head], fill, self.mesh, keep_gathered=True)
            for method in ("loss", "logits"):
                register_fsdp_forward_method(head, method)
        self._shard([model], fill, self.mesh, keep_gathered=True)
        for method in ("run", "loss", "logits"):
            register_fsdp_forward_method(model, method)
        self.prefetch.apply(gathered, cast("FSDPModule | None", embedding), cast("FSDPModule | None", head))

    def _units(self, blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
        sizes = []
        for block in blocks:
            sizes.append(sum(parameter.numel() for parameter in block.parameters()))
        units = []
        for indices in units_of(sizes, self.unit_params):
            units.append([blocks[index] for index in indices])
        return units

    def _shard_experts(self, blocks: Sequence[nn.Module], fill: Callable[[nn.Module], None]) -> list[nn.Module]:
        """Shard the experts of some blocks, each experts module as a unit, and return the modules."""
        if self.expert_mesh is None:
            return []
        experts: list[nn.Module] = []
        for block in blocks:
            experts += experts_of(block)
        for module in experts:
            self._shard([module], fill, self.expert_mesh, self.keep_gathered)
            unit = cast(FSDPModule, module)
            # torch sums, and `FullySharded.reduce` divides. Only NCCL averages by another divisor than the number of
            # ranks, and torch 2.15 divides the gradients of a unit on a single rank twice.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        return experts

    def _shard(
        self, modules: list[nn.Module], fill: Callable[[nn.Module], None], mesh: DeviceMesh, keep_gathered: bool
    ) -> None:
        for module in modules:
            fill(module)
        dtypes = self.precision
        # torch 2.15 warns of outputs that are views. No module here changes the output of another in place.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        offload_policy = OffloadPolicy()
        if self.offload:
            offload_policy = CPUOffloadPolicy(torch.accelerator.is_available())
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=mesh,
            reshard_after_forward=not keep_gathered,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=dtypes.params, reduce_dtype=dtypes.reduce, cast_forward_inputs=False
            ),
            offload_policy=offload_policy,
        )


def embedding_and_head(model: nn.Module) -> tuple[VocabEmbedding | None, VocabHead | None]:
    """Embedding and output projection of a model.

    Each is None on a pipeline stage without the layer. Both are None if they share one matrix.
    """
    embedding: VocabEmbedding | None = None
    head: VocabHead | None = None
    for module in model.modules():
        if isinstance(module, VocabEmbedding):
            embedding = module
        if isinstance(module, VocabHead):
            head = module
    if embedding is not None and head is not None and embedding.weight is head.weight:
        return None, None
    return embedding, head


def experts_of(block: nn.Module) -> list[nn.Module]:
    """Outermost modules of a block whose parameters all belong to experts."""
    specs = ParamTable.of(block)
    experts: list[nn.Module] = []
    inside: list[str] = []
    for name, module in block.named_modules():
        prefix = f"{name}." if name else ""
        own = [spec for parameter, spec in specs.items() if parameter.startswith(prefix)]
        if own and all(spec.expert for spec in own) and not prefix.startswith(tuple(inside)):
            experts.append(module)
            inside.append(prefix)
    return experts


class FullySharded(DataParallel):
    """Data parallelism in which `fully_shard` shards the parameters, and every rank updates its shards.

    Args:
        model: Model that `Sharding.apply` has sharded.
        layout: Entries of the parameters that this rank holds.
    """

    has_whole_parameters = False

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
        self._experts = [name for name in self._parameters if layout.table[name].expert]
        self._num_copies = layout.mesh.dense.copies.size

    def begin(self, *, last: bool) -> None:
        # The shard axis reduces every micro-batch, to keep gradients sharded; the replica axis reduces only their sum.
        self._model.set_requires_all_reduce(last)

    def reduce(self) -> dict[str, Tensor]:
        grads = {name: _local_grad(parameter) for name, parameter in self._parameters.items()}
        for parameter in self._parameters.values():
            parameter.grad = None
        if self.layout.mesh.ep_size > 1:
            for name in self._experts:
                grads[name].div_(self._num_copies)
        return grads

    def publish(self) -> None:
        """Do nothing, because the next forward pass gathers the updated shards."""


def _local_grad(parameter: DTensor) -> Tensor:  # a fault point: tests inject bad gradients here
    assert parameter.grad is not None, "a parameter has no gradient after the backward pass"
    return cast(DTensor, parameter.grad).to_local()
