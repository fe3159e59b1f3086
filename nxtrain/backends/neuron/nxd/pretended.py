"""NeuronX Distributed for a rank that is not there, so that its graphs can be traced on any machine that imports it."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nxtrain.backends.neuron.hardware import Instance
from nxtrain.backends.neuron.nxd.binding import NxdBinding
from nxtrain.errors import BackendError


def load(instance: Instance) -> None:
    """Import what a run on an instance imports of NxD.

    Raises:
        BackendError: It does not import, or cannot be put in an instance. Without their device AWS's packages may fail
            in any way.
    """
    try:
        import nxtrain.backends.neuron.nxd.groups
        import nxtrain.backends.neuron.nxd.layers  # noqa: F401
    except Exception as error:
        raise BackendError(f"neuronx-distributed does not import here: {type(error).__name__}: {error}") from error
    _put_in(instance)


class PretendedNxd(NxdBinding):
    """NxD for one rank of a pretended world; all but the other ranks and the kind of machine is that of a run.

    NxD reads the ranks of each machine in `LOCAL_WORLD_SIZE`, which the process must have from its start.

    Args:
        device: Where this rank's tensors live.
        world, rank: Pretended, 0 <= rank < world.
        instance: Pretended machine, whose wiring decides NxD's order of ranks.

    Raises:
        BackendError: The package does not import, or asks for its platform in another way than 0.15 to 0.18.
    """

    _meets = False

    def __init__(self, device: torch.device, world: int, rank: int, instance: Instance) -> None:
        super().__init__(device)
        self._world, self._rank = world, rank
        self._lnc = instance.physical_cores
        _put_in(instance)

    def _join(self) -> None:
        if dist.is_initialized():
            return
        import torch_xla.distributed.xla_backend  # noqa: F401

        dist.init_process_group("xla", store=dist.HashStore(), rank=self._rank, world_size=self._world)
        self._owns_process_group = True


def _put_in(instance: Instance) -> None:
    """Have NxD lay out ranks as on an instance, whatever machine this is: it asks a function of torch-neuronx."""
    from neuronx_distributed.parallel_layers import parallel_state

    names = vars(parallel_state)
    if "get_platform_target" not in names:
        raise BackendError("neuronx-distributed asks for its platform in a way that nxtrain cannot answer")
    names["get_platform_target"] = lambda: instance.target
