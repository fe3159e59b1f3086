"""A stand-in for TorchNeuron's device on CPU tensors: refuses what the device refuses, and counts its work.

Tensors come to the device by a copy to `DEVICE`, a CPU with an index. Results of operations on them are on the device,
and so is what such an operation writes to. Every other tensor is the host's.

The device refuses:

- a collective of host tensors, and one of 64-bit numbers beyond 32 bits: they travel as 32-bit ones;
- a barrier among some ranks;
- compiled collectives over groups that no `init_device_mesh` has made;
- a view of another type, unless `bitcasts` allows it;
- a process group made after the first operation of the process.

Source of the list: torch/guides/torch-distributed.html in https://awsdocs-neuron.readthedocs-hosted.com/en/latest and
the behaviour that users of the beta report.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

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
    """Work of the device.

    Args:
        dispatches: Operations and graphs that the host handed over.
        collectives: Collectives among these.
        wide: 64-bit integers among what collectives carried.
        compilations: Operations and graphs that were new, by shapes and types.
        graphs: Graphs among these.
        fallbacks: Operations that ran on the host instead.
        names: Dispatches by name.
    """

    dispatches: int = 0
    collectives: int = 0
    wide: int = 0
    compilations: int = 0
    graphs: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    names: Counter[str] = field(default_factory=Counter)


class StandInDevice(TorchDispatchMode):
    """The device of this process.

    Args:
        bitcasts: Views of another type are supported.
        on_host: Operations, such as `aten::cumsum`, that the device lacks and the host computes.
        compile_s: Seconds for which a first compilation delays its caller.

    Attributes:
        compiles_only: Graphs are compiled and do not run; what they return is no number.
        digests: Hashes of all graphs, as names of their files.
    """

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
        """Start the list of fallbacks anew."""
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
                found = _unknown(graph) if self.compiles_only else graph.forward(*args)
            for leaf in tree_leaves(found):
                if isinstance(leaf, Tensor):
                    self._place(leaf, here=True)
            return found

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
        here = [place for x in tensors if (place := self._is_here(x)) is not None]
        on_device = any(here) or _asks_for(kwargs)
        if on_device:
            self._admit(func, name, tensors)
        found = func(*args, **kwargs)
        given = zip(args, func._schema.arguments, strict=False)  # the others have their defaults, or are in kwargs
        written = [arg for arg, of in given if of.alias_info and of.alias_info.is_write]
        for leaf in tree_leaves((found, written, kwargs.get("out"))):
            # Memory that holds nothing yet is of no place: collectives write into it.
            if isinstance(leaf, Tensor) and (on_device or here or not (tensors or name.startswith("empty"))):
                self._place(leaf, here=on_device)
        return found

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
            found = func(*args, **kwargs)
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self._place(leaf, here=True)
        return found

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
        found = self._places.get(x.untyped_storage()._cdata)
        return found[1] if found and not found[0].expired() else None


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
