"""Memory, speed and profiles of a TorchNeuron device, by `torch.neuron` functions that a release may lack."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from nxtrain.backends.c10d import C10dDiagnostics
from nxtrain.backends.neuron.hardware import INSTANCES, chip_kind, this_machine

DEVICE_TYPE = "neuron"
"""Device type of TorchNeuron in torch, for device meshes."""


class NeuronNativeDiagnostics(C10dDiagnostics):
    """Memory, speed, fallbacks and profiles of one logical NeuronCore."""

    def fallbacks(self) -> tuple[str, ...]:
        operations: Iterable[object] = _call("get_fallback_ops") or ()
        return tuple(sorted(map(str, operations)))

    def forget_fallbacks(self) -> None:
        _call("clear_op_tracking")

    def num_compiled(self) -> int:
        # Dynamo counts the graphs that it hands to its compilers; operations outside of graphs are not counted.
        dynamo = sys.modules.get("torch._dynamo.utils")
        return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo else 0

    def peak_flops(self, params: str = "bf16") -> float | None:
        instance = this_machine()
        if instance is not None:
            return instance.device_flops
        kind = chip_kind(str(getattr(_call("get_device_properties"), "name", "")))
        return next((known.device_flops for known in INSTANCES.values() if known.target == kind), None)

    def profiler_options(self, profiles: Path) -> tuple[dict[str, Any], str]:
        from nxtrain.backends.neuron.native_profile import native_profiler  # torch's profiler takes time to import

        return native_profiler(profiles, os.environ)

    def finish_profiled(self) -> None:
        # The host runs ahead of the device; a profile that ends too early lacks the device's last operations.
        _call("synchronize")

    def peak_memory_bytes(self) -> int:
        # The allocator counts finished work only, so the device must finish its queue first.
        _call("synchronize")
        return int(_call("max_memory_allocated") or 0)


def _call(name: str) -> Any:
    """Call a TorchNeuron function without arguments; return None if this release lacks the function."""
    function = find_function(name)
    return function() if function else None


def find_function(name: str) -> Callable[[], Any] | None:
    """Find a function in `torch.neuron`, or in `torch_neuronx` of older releases; None if neither has the function."""
    function = _function(getattr(torch, DEVICE_TYPE, None), name)
    if function is not None:
        return function
    try:
        import torch_neuronx
    except ImportError:
        return None
    return _function(torch_neuronx, name)


def _function(module: object, name: str) -> Callable[[], Any] | None:
    function = getattr(module, name, None)
    return function if callable(function) else None
