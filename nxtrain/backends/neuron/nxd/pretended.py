"""NeuronX Distributed for a pretended rank, whose graphs can be traced on any machine with the package."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nxtrain.backends.neuron.nxd.binding import NxdBinding
from nxtrain.common.errors import BackendError
from nxtrain.common.machines import Machine


def load(instance: Machine) -> None:
    """Import the modules of NxD that a run imports, and pretend a kind of instance.

    Raises:
        BackendError: NxD cannot be imported, or its platform cannot be replaced. Without their device AWS's packages
            may fail in any way.
    """
    try:
        import nxtrain.backends.neuron.nxd.groups
        import nxtrain.backends.neuron.nxd.layers  # noqa: F401
    except Exception as error:
        raise BackendError(f"neuronx-distributed does not import here: {type(error).__name__}: {error}") from error
    _pretend_platform(instance)


class PretendedNxd(NxdBinding):
    """NxD for one rank of a pretended world; only the other ranks and the kind of machine differ from a run.

    NxD reads the number of ranks per machine from `LOCAL_WORLD_SIZE`, which must be set before the process starts.

    Args:
        device: Device of this rank's tensors.
        world, rank: Pretended world and rank, 0 <= rank < world.
        instance: Pretended machine, whose wiring decides NxD's order of ranks.

    Raises:
        BackendError: The package cannot be imported, or detects its platform in another way than 0.15 to 0.18.
    """

    _meets = False

    def __init__(self, device: torch.device, world: int, rank: int, instance: Machine) -> None:
        super().__init__(device)
        self._world, self._rank = world, rank
        self._lnc = instance.physical_cores
        _pretend_platform(instance)

    def _join(self) -> None:
        if dist.is_initialized():
            return
        import torch_xla.distributed.xla_backend  # noqa: F401

        dist.init_process_group("xla", store=dist.HashStore(), rank=self._rank, world_size=self._world)
        self._owns_process_group = True


def _pretend_platform(instance: Machine) -> None:
    """Make NxD lay out ranks as on an instance, by replacing the function of torch-neuronx that names the platform."""
    from neuronx_distributed.parallel_layers import parallel_state

    names = vars(parallel_state)
    if "get_platform_target" not in names:
        raise BackendError("neuronx-distributed asks for its platform in a way that nxtrain cannot answer")
    names["get_platform_target"] = lambda: instance.target
