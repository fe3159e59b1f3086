"""A fake of TorchNeuron: CPU tensors and gloo behind the names of its device, process group and compiler.

`tests.support.neuron_device` refuses and counts what the device does. Of AWS's own code the fake shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from nxtrain.backends.base import Support
from nxtrain.backends.c10d import C10dBackend
from nxtrain.backends.neuron import native, native_diagnostics, torchneuron
from nxtrain.backends.neuron.native import NeuronNativeBackend
from tests.support.neuron_device import DEVICE, StandInDevice

device = StandInDevice()
"""The device of this process."""


def install() -> None:
    """Pretend, for the rest of this process, that TorchNeuron is here."""
    torch.neuron = _module()  # type: ignore[attr-defined]
    torchneuron.support = lambda *, devices=True: Support(True, "a fake")
    native.DEVICE = DEVICE
    if "neuron" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("neuron", _process_group, devices=["cpu"])
    torch._dynamo.register_backend(_compile, name="neuron")
    _observe_meshes()
    _observe_end()
    _step_aside()
    torch.Tensor.cpu = device.to_host  # type: ignore[method-assign, assignment]
    device.__enter__()


def _module() -> ModuleType:
    """`torch.neuron`, with what AWS's pages document of it."""
    module = ModuleType("torch.neuron")
    found: dict[str, Any] = {
        "synchronize": lambda: None,
        "max_memory_allocated": lambda: 3 << 20,
        "get_fallback_ops": lambda: sorted(device.counts.fallbacks),
        "clear_op_tracking": device.forget_fallbacks,
    }
    module.__dict__.update(found)
    return module


def _compile(graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Any:
    return device.compile(graph, inputs)


def _process_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    if device.begun and not dist.is_initialized():
        raise RuntimeError("the runtime is initialized: a process group must come before the first use of the device")
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _step_aside() -> None:
    """Take the device's mode off the stack within compiled functions, whose guards compare the stack."""
    make = torch.compile

    def compile_(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        made = make(function, **options)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            with _disable_current_modes():
                return made(*args, **kwargs)

        return call

    torch.compile = compile_  # type: ignore[assignment]


def _observe_meshes() -> None:
    """Note the groups that `init_device_mesh` makes, whose whole partition of the world is known then."""
    made = device_mesh.init_device_mesh

    def init_device_mesh(device_type: str, mesh_shape: Sequence[int], **options: Any) -> Any:
        assert device_type == native_diagnostics.DEVICE_TYPE, device_type
        mesh = made("cpu", tuple(mesh_shape), **options)
        device.known_groups |= {group.group_name for group in mesh.get_all_groups()}
        return mesh

    device_mesh.init_device_mesh = init_device_mesh


def _observe_end() -> None:
    """A process whose backend has closed is as good as a new one."""
    leave = NeuronNativeBackend.close

    def close(backend: C10dBackend) -> None:
        leave(backend)
        device.restart()

    NeuronNativeBackend.close = close  # type: ignore[method-assign, assignment]
