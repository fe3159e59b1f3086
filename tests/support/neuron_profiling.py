"""A stand-in for `torch_neuronx.profiling`: the names, modes and parameters that AWS documents, and no others.

Source: tools/neuron-explorer/how-to-profile-pytorch.html in https://awsdocs-neuron.readthedocs-hosted.com/en/latest.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from types import ModuleType

from torch._C._profiler import _ExperimentalConfig

MADE: list[NeuronConfig] = []
"""Every configuration of this process."""


class ProfileMode(Enum):
    """Kinds of files."""

    DEVICE = 0
    RUNTIME = 1
    CPU_UTIL = 2
    HOST_MEMORY = 3


class NeuronConfig(_ExperimentalConfig):
    """Choice of files, which torch's profiler passes on."""

    def __init__(
        self,
        modes: Sequence[ProfileMode] = (ProfileMode.DEVICE, ProfileMode.RUNTIME),
        *,
        max_events_per_nc: int = 0,
        capture_enabled_for_nc: str = "",
        profile_output_dir: str = "",
        neff_cache_dir: str = "",
        precache_node_info: bool = True,
    ) -> None:
        super().__init__()
        self.modes, self.profile_output_dir = [mode.name for mode in modes], profile_output_dir
        MADE.append(self)


def modules() -> dict[str, ModuleType]:
    """Packages with the stand-in, for `sys.modules`."""
    package, profiling = ModuleType("torch_neuronx"), ModuleType("torch_neuronx.profiling")
    profiling.__dict__.update(NeuronConfig=NeuronConfig, ProfileMode=ProfileMode)
    return {"torch_neuronx": package, "torch_neuronx.profiling": profiling}
