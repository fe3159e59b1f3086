"""A fake of TorchNeuron: CPU tensors and gloo behind the names that its device, process group and compiler have.

It shows what our backend asks for, and under which name. Of AWS's own code it shows nothing.
"""

from __future__ import annotations

from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from nxtrain.backends.base import Support
from nxtrain.backends.neuron import native, torchneuron


def install() -> None:
    """Pretend, for the rest of this process, that TorchNeuron is here."""
    torch.neuron = ModuleType("torch.neuron")  # type: ignore[attr-defined]
    torchneuron.support = lambda: Support(True, "a fake")
    native.DEVICE = "cpu"
    if "neuron" not in dist.Backend.backend_list:
        dist.Backend.register_backend("neuron", _process_group, devices=["cpu"])
        torch._dynamo.register_backend(_compile, name="neuron")


def _compile(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def _process_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)
