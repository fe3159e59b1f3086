"""A fake of TorchNeuron: CPU tensors and gloo behind the names of its device, process group and compiler.

`tests.support.fake_neuron` refuses and counts what the device does. Of AWS's own code the fake shows nothing.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from functools import wraps
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch._subclasses import FakeTensor
from torch.distributed import device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from nxtrain.backends.base import Support
from nxtrain.backends.c10d import C10dBackend
from nxtrain.backends.neuron import native, native_diagnostics, torchneuron
from nxtrain.backends.neuron.native import NeuronNativeBackend

MADE: list[NeuronConfig] = []
"""Every configuration of this process."""


class ProfileMode(Enum):
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
    package, profiling = ModuleType("torch_neuronx"), ModuleType("torch_neuronx.profiling")
    profiling.__dict__.update(NeuronConfig=NeuronConfig, ProfileMode=ProfileMode)
    return {"torch_neuronx": package, "torch_neuronx.profiling": profiling}


DEVICE = "cpu:0"
"""Device of the stand-in; host tensors are on `cpu`, without an index."""

FREE = {
    *("view", "_unsafe_view", "as_strided", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice"),
    *("select", "split", "split_with_sizes", "detach", "alias", "narrow", "unbind", "chunk", "empty", "empty_strided"),
    *("empty_like", "new_empty", "lift_fresh", "_reshape_alias", "is_same_size", "set_", "new_empty_strided"),
}
"""Operations that compute nothing on the device."""


@dataclass
class Counts:
    dispatches: int = 0
    collectives: int = 0
    wide: int = 0
    compilations: int = 0
    graphs: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)


class StandInDevice(TorchDispatchMode):
    def __init__(self, *, bitcasts: bool = True, on_host: Sequence[str] = (), compile_s: float = 0.0) -> None:
        super().__init__()
        self.bitcasts, self.on_host, self.compile_s = bitcasts, set(on_host), compile_s
        self.compiles_only = False
        self.counts, self.digests = Counts(), set[str]()
        self.known_groups: set[str] = set()
        self.begun = False
        self._inside = 0
        self._compiled: set[object] = set()
        self._places: dict[int, tuple[StorageWeakRef, bool]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def restart(self) -> None:
        """Forget everything, as a new process would."""
        self.counts, self.begun = Counts(), False
        self.digests.clear()
        self.known_groups.clear()
        self._compiled.clear()
        self._places.clear()

    def forget_fallbacks(self) -> None:
        self.counts.fallbacks.clear()

    @property
    def to_host(self) -> Callable[[Tensor], Tensor]:
        """`torch.Tensor.cpu`, which copies what is on the device."""
        stay = torch.Tensor.cpu

        def cpu(x: Tensor) -> Tensor:
            if self._inside or not self._is_here(x):
                return stay(x)
            with self._quiet():
                copy = x.clone()
            self._place(copy, here=False)
            return copy

        return cpu

    def compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        """Backend of `torch.compile`: forward and backward graphs of elementary operations, one dispatch each."""
        from torch._dynamo.backends.common import aot_autograd

        compiled: Callable[..., Any] = aot_autograd(
            fw_compiler=self._graph, bw_compiler=self._graph, keep_inference_input_mutations=True
        )(graph, inputs)
        return compiled

    def _graph(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        from torch._functorch.aot_autograd import make_boxed_func

        self._check_groups(graph)
        self._compile(object())
        self.counts.graphs += 1
        shapes = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in inputs]
        self.digests.add(hashlib.sha256(f"{graph.code} {shapes}".encode()).hexdigest())

        def run(*args: Any) -> Any:
            self.counts.dispatches += 1
            self.counts.names["graph"] += 1
            self.begun = True
            with _disable_current_modes():
                result = _unknown(graph) if self.compiles_only else graph.forward(*args)
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._place(leaf, here=True)
            return result

        return make_boxed_func(run)  # type: ignore[no-any-return]

    def _check_groups(self, graph: torch.fx.GraphModule) -> None:
        for node in graph.graph.nodes:
            if node.op != "call_function" or getattr(node.target, "namespace", "") != "_c10d_functional":
                continue
            names = [arg for arg in node.args if isinstance(arg, str) and arg not in {"sum", "max", "avg", "min"}]
            for name in names:
                if name not in self.known_groups and name != dist.group.WORLD.group_name:  # type: ignore[union-attr]
                    raise RuntimeError(f"replica groups of {name} are unknown: replica id not seen in replica groups")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self._inside or any(isinstance(x, FakeTensor) for x in tensors) or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            return self._collective(func, name, tensors, args, kwargs)
        here = [position for x in tensors if (position := self._is_here(x)) is not None]
        on_device = any(here) or _asks_for(kwargs)
        if on_device:
            self._admit(func, name, tensors)
        result = func(*args, **kwargs)
        given = zip(args, func._schema.arguments, strict=False)  # the others have their defaults, or are in kwargs
        written = [arg for arg, of in given if of.alias_info and of.alias_info.is_write]
        for leaf in tree_leaves((result, written, kwargs.get("out"))):
            # Memory that holds nothing yet is of no place: collectives write into it.
            if isinstance(leaf, Tensor) and (on_device or here or not (tensors or name.startswith("empty"))):
                self._place(leaf, here=on_device)
        return result

    def _admit(self, func: Any, name: str, tensors: Sequence[Tensor]) -> None:
        """Count an operation of the device, and refuse one that the device lacks."""
        if name in ("view", "_reshape_alias") and str(func) == "aten.view.dtype" and not self.bitcasts:
            # The type of error with which torch's dispatcher refuses what a device has no kernel for.
            raise NotImplementedError("aten::view.dtype is not implemented for the device neuron")
        if name in FREE:
            return
        self.begun = True
        self.counts.dispatches += 1
        self.counts.names[name] += 1
        self._compile((str(func), *((tuple(x.shape), x.dtype) for x in tensors)))
        if f"aten::{name}" in self.on_host:
            self.counts.fallbacks[f"aten::{name}"] += 1

    def _collective(
        self, func: Any, name: str, tensors: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        group = next((_group(arg) for arg in args if _group(arg) is not None), None)
        if group is not None and dist.get_backend(group) == "neuron":
            if name == "barrier" and group.size() != dist.get_world_size():
                raise RuntimeError("barrier is supported on the default process group only")
            self.begun = True
            self.counts.dispatches += 1
            self.counts.collectives += 1
            self.counts.names[name] += 1
            for x in tensors if name != "barrier" else ():
                if self._is_here(x) is False:
                    raise RuntimeError(f"No backend type associated with device type cpu, in {name}")
                self.counts.wide += x.dtype == torch.int64
                if x.dtype == torch.int64 and x.numel() and x.abs().max() >= 1 << 31:
                    raise OverflowError(f"{name} of int64 numbers that do not fit the int32 that they travel as")
        with self._quiet():
            result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._place(leaf, here=True)
        return result

    def _compile(self, key: object) -> None:
        if key not in self._compiled:
            self._compiled.add(key)
            self.counts.compilations += 1
            time.sleep(self.compile_s)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def _place(self, x: Tensor, *, here: bool) -> None:
        if type(x) in (Tensor, torch.nn.Parameter) and not isinstance(x, FakeTensor):
            storage = x.untyped_storage()
            self._places[storage._cdata] = StorageWeakRef(storage), here

    def _is_here(self, x: Tensor) -> bool | None:
        """True for a tensor of the device, False for one of the host, None if nobody knows."""
        if type(x) not in (Tensor, torch.nn.Parameter):
            return None
        result = self._places.get(x.untyped_storage()._cdata)
        return result[1] if result and not result[0].expired() else None


def _unknown(graph: torch.fx.GraphModule) -> list[Any]:
    """Results of a graph that has not run: tensors of the right shapes that hold no numbers."""
    (results,) = next(iter(graph.graph.find_nodes(op="output"))).args
    values = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in results]
    return [
        torch.full(tuple(x.shape), float("nan") if x.is_floating_point() else 0, dtype=x.dtype)
        if isinstance(x, Tensor)
        else x
        for x in values
    ]


def _asks_for(kwargs: dict[str, Any]) -> bool:
    """True if an operation makes tensors of the device."""
    device = kwargs.get("device")
    return device is not None and torch.device(device).index is not None


def _group(arg: Any) -> Any:
    if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
        return dist.ProcessGroup.unbox(arg)
    return None


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
    result: dict[str, Any] = {
        "synchronize": lambda: None,
        "max_memory_allocated": lambda: 3 << 20,
        "get_fallback_ops": lambda: sorted(device.counts.fallbacks),
        "clear_op_tracking": device.forget_fallbacks,
    }
    module.__dict__.update(result)
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
    close_backend = NeuronNativeBackend.close

    def close(backend: C10dBackend) -> None:
        close_backend(backend)
        device.restart()

    NeuronNativeBackend.close = close  # type: ignore[method-assign, assignment]
