"""Binding of one rank to NeuronX Distributed: parallel layers, rank order and gradient averages."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nxtrain.backends.base import Binding
from nxtrain.backends.neuron.hardware import this_machine
from nxtrain.backends.neuron.sdk import unverified_notes
from nxtrain.common.distributed.collectives import Collectives, Done, Pending
from nxtrain.common.errors import BackendError
from nxtrain.common.layers import LayerSet
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.common.process.greetings import suppress_gloo_messages
from nxtrain.common.sharding import ParamTable


class NxdBinding(Binding):
    """Parallel layers, rank order and gradient averages of NeuronX Distributed (NxD) for one rank.

    Args:
        device: Device of this rank's tensors.

    Raises:
        BackendError: neuronx-distributed cannot be imported.
    """

    name = "nxd"
    _meets = True  # the other ranks of the world exist

    def __init__(self, device: torch.device) -> None:
        # Each layer calls a deprecated torch.cuda.amp.
        warnings.filterwarnings("ignore", r"`torch\.cuda\.amp", FutureWarning, r"neuronx_distributed\.")
        try:
            from neuronx_distributed.parallel_layers import comm, grads, mappings
        except ImportError as error:
            raise BackendError(_import_failure(error)) from error
        # NxD pins the layouts of all-reduces in its layers and in `bucket_allreduce_gradients`. torch.distributed does
        # not pin layouts, and XLA's verifier refuses a graph with both kinds of all-reduce.
        for module in (grads, mappings):
            module.all_reduce = partial(comm.all_reduce, pin_layout=False)
        self._is_cpu = device.type == "cpu"
        self._owns_process_group = False
        self._sums_over_dp = False
        machine = this_machine()
        self._lnc = machine.physical_cores if machine else 1

    def rank_order(self, *, tp: int, pp: int) -> tuple[int, ...]:
        from nxtrain.backends.neuron.nxd.groups import rank_order

        self._join()
        if dist.get_world_size() % (tp * pp):
            return ()  # the mesh raises the better error
        return rank_order(tp=tp, pp=pp, lnc=self._lnc)

    def layers(self, native: LayerSet, mesh: Mesh, dtype: torch.dtype) -> LayerSet:
        from nxtrain.backends.neuron.nxd.groups import initialize, sums_over_dp
        from nxtrain.backends.neuron.nxd.layers import NxdLayers

        self._join()
        if self._is_cpu:
            _refuse_descending(mesh)
        initialize(mesh, lnc=self._lnc, meets=self._meets)
        self._sums_over_dp = sums_over_dp(mesh)
        return NxdLayers(native, dtype)

    def mark(self, model: nn.Module, tp: Axis) -> None:
        from neuronx_distributed.parallel_layers.utils import set_tensor_model_parallel_attributes

        table = ParamTable.of(model)
        for name, parameter in model.named_parameters():
            spec = table[name]
            # NxD's stride: the number of segments if they are equally long and each is sharded over all ranks.
            stride = 1
            if {(segment.size, segment.replicas) for segment in spec.segments} == {(spec.segments[0].size, 1)}:
                stride = len(spec.segments)
            dim, num_partitions = -1, 1
            if spec.dim is not None:
                dim, num_partitions = spec.dim, tp.size
            set_tensor_model_parallel_attributes(
                tensor=parameter,
                is_parallel=spec.dim is not None,
                dim=dim,
                stride=stride,
                num_partitions=num_partitions,
            )
            vars(parameter).update(sequence_parallel_enabled=spec.partial_gradient, shared=spec.tied_to is not None)

    def start_average(
        self, grads: Sequence[Tensor], dp: Axis, dtype: torch.dtype, comm: Collectives
    ) -> Pending[list[Tensor]]:
        from neuronx_distributed.parallel_layers.grads import bucket_allreduce_gradients

        if dp.size == 1 or not self._sums_over_dp:
            return super().start_average(grads, dp, dtype, comm)
        # NxD reduces in place, which torch-xla does correctly only on tensors that no other operation has changed.
        fresh = [grad.to(dtype, copy=True, memory_format=torch.contiguous_format) for grad in grads]
        bucket_allreduce_gradients(grads_list=fresh)
        return Done(fresh)

    def notes(self) -> tuple[str, ...]:
        return unverified_notes()

    def close(self) -> None:
        from nxtrain.backends.neuron.nxd.groups import forget

        forget()
        if self._owns_process_group:
            dist.destroy_process_group()

    def _join(self) -> None:
        """Create torch's default process group, which NxD needs even with one rank."""
        if dist.is_initialized():
            return
        if self._is_cpu:
            with suppress_gloo_messages():
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        else:
            import torch_xla.distributed.xla_backend  # noqa: F401

            dist.init_process_group("xla", init_method="xla://")
        self._owns_process_group = True


def _refuse_descending(mesh: Mesh) -> None:
    """Raise an error for groups that are not in ascending order, since gloo would permute gathered shards.

    gloo orders the ranks of a group ascending.
    """
    for axis in (mesh.tp, mesh.shard):
        for group in axis.groups:
            if list(group) != sorted(group):
                raise BackendError(
                    f"gloo needs groups of ascending ranks, but NxD's {axis.name} group is {group}; use another "
                    "parallel.tp, or backend.layers=native"
                )


def _import_failure(error: ImportError) -> str:
    missing = error.name or ""
    way_out = f"pip install {missing.partition('.')[0]}, which it does not declare"
    if missing.startswith("transformers."):
        way_out = "pip install 'transformers==4.51.*', the release that it was made for"
    return (
        f"backend.layers=nxd: neuronx-distributed cannot be imported: {error}. Install the missing package "
        f"({way_out}), or use backend.layers=native"
    )
