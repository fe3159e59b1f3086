"""NeuronX Distributed for one rank of a simulated world, to trace graphs on any machine with the package."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nxtrain.backends.neuron.nxd.binding import NxdBinding
from nxtrain.common.errors import BackendError
from nxtrain.common.machines import Machine


def load(instance: Machine) -> None:
    """Import NxD's modules, and make NxD simulate an instance type.

    Raises:
        BackendError: NxD cannot be imported, or its platform check cannot be replaced. Without a Neuron device, AWS's
            packages may raise errors of any type.
    """
    try:
        import nxtrain.backends.neuron.nxd.groups
        import nxtrain.backends.neuron.nxd.layers  # noqa: F401
    except Exception as error:
        raise BackendError(f"neuronx-distributed cannot be imported here: {type(error).__name__}: {error}") from error
    _simulate_platform(instance)


class SimulatedNxd(NxdBinding):
    """NxD binding of one rank in a simulated world, without the other ranks and without the Trainium instance.

    NxD reads the number of ranks per machine from `LOCAL_WORLD_SIZE`, which must be set before the process starts.

    Args:
        device: Device of this rank's tensors.
        world, rank: Simulated world size and rank, 0 <= rank < world.
        instance: Simulated instance type, whose interconnect decides NxD's rank order.

    Raises:
        BackendError: neuronx-distributed cannot be imported, or its platform check differs from releases 0.15 to 0.18.
    """

    _meets = False

    def __init__(self, device: torch.device, world: int, rank: int, instance: Machine) -> None:
        super().__init__(device)
        self._world, self._rank = world, rank
        self._lnc = instance.physical_cores
        _simulate_platform(instance)

    def _join(self) -> None:
        if dist.is_initialized():
            return
        import torch_xla.distributed.xla_backend  # noqa: F401

        dist.init_process_group("xla", store=dist.HashStore(), rank=self._rank, world_size=self._world)
        self._owns_process_group = True


def _simulate_platform(instance: Machine) -> None:
    """Make NxD group ranks as on an instance type, by replacing torch-neuronx's platform check."""
    from neuronx_distributed.parallel_layers import parallel_state

    names = vars(parallel_state)
    if "get_platform_target" not in names:
        raise BackendError(
            "neuronx-distributed has no parallel_state.get_platform_target, which nxtrain replaces to simulate an "
            "instance; install a release from 0.15 to 0.18"
        )
    names["get_platform_target"] = lambda: instance.target
