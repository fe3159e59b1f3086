"""Tracing of one rank of a simulated world: its XLA graphs are recorded as for a compiler, and never run.

torch-xla accepts any world size and rank. Each graph is dropped once it is recorded, so its results become opaque
inputs of the next graph, as after an execution.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nxtrain.backends.base import Backend, Binding, fetched_names
from nxtrain.backends.xla.backend import XlaBackend
from nxtrain.backends.xla.graphs import freeze_older_objects, hash_of, pending
from nxtrain.common.machines import Machine

UPLOADED_ENTRIES = 4096
"""Most entries of a tensor whose values are uploaded, since torch-xla folds single numbers by value."""


class GraphRecorder(Protocol):
    """Interface of a recorder of a rank's graphs and device-to-host reads."""

    def graph(self, hash_: str, text: Callable[[], str]) -> None:
        """Record a graph that a run would execute; `text` returns its HLO, and may be called during this call only."""
        ...

    def host_read(self, file: str, line: int, function: str) -> None:
        """Record a device-to-host read, with the file, line and function that caused it."""
        ...


def simulated_nxd(instance: Machine) -> Callable[[Backend], Binding]:
    """Return a function that creates a backend's NeuronX Distributed binding, as on an EC2 instance type.

    Raises:
        BackendError: NeuronX Distributed cannot be imported.
    """
    from nxtrain.backends.neuron.nxd.simulated import SimulatedNxd, load

    load(instance)
    return lambda backend: SimulatedNxd(backend.device, backend.world, backend.rank, instance)


class TracingBackend(XlaBackend):
    """Backend that records the graphs of one rank of a simulated world; a process may trace ranks in sequence.

    Args:
        world, rank: Simulated world size and rank, 0 <= rank < world.
        tape: Recorder of graphs and device-to-host reads.
    """

    def __init__(self, world: int, rank: int, tape: GraphRecorder) -> None:
        import torch_xla
        import torch_xla.runtime as xr

        xr._WORLD_SIZE, xr._ORDINAL = world, rank
        super().__init__(sync=self._hand_over)
        self._xla: Any = torch_xla._XLAC
        self._tape, self._recording = tape, False
        freeze_older_objects()

    def put(self, x: Tensor) -> Tensor:
        if self._recording or x.numel() <= UPLOADED_ENTRIES:
            # A meta tensor without storage may be small too.
            return super().put(torch.zeros(x.shape, dtype=x.dtype) if x.is_meta else x)
        # Values never reach a graph, so built tensors need no storage: zeros that are dropped before they are computed.
        return torch.zeros(x.shape, dtype=x.dtype, device=self.device)

    @contextmanager
    def building(self) -> Iterator[None]:
        """Context for building a model and its state, in which large host tensors are meta tensors without storage.

        `put` reads only their shape. Filling them with zeros took half of the time of a trace.
        """
        with _WithoutStorage():
            yield

    def fetch(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        self._compare()
        self._hand_over()
        return dict.fromkeys(fetched_names(values), 1.0)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context that records graphs and forbids execution; earlier tensors count as computed."""
        self._drop()
        self._recording = True
        self._xla._set_allow_execution(False)
        try:
            with _noting_reads(self._tape):
                yield
        except RuntimeError as error:
            if "Unexpected execution" not in str(error):
                raise
            self._tape.host_read(*_calling_code(error.__traceback__))
        finally:
            self._xla._set_allow_execution(True)
            self._recording = False
            self._drop()

    def _hand_over(self) -> None:
        computed = pending(self.device) if self._recording else []
        if computed:
            self._tape.graph(hash_of(computed), lambda: str(self._xla._get_xla_tensors_hlo(computed)))
        self._drop()

    def _drop(self) -> None:
        device = str(self.device)
        self._xla._clear_pending_irs(device)
        # Collectives are chained by a token; a stale one would chain them across graphs.
        self._xla._set_all_reduce_token(device, None)


class _WithoutStorage(TorchFunctionMode):
    """Torch function mode that puts large results of `torch.zeros` and `Tensor.cpu` on the meta device."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        made = None
        if function is torch.zeros and _is_host(options.get("device", "cpu")):
            made = torch.zeros(*args, **{**options, "device": "meta"})
        elif function is torch.Tensor.cpu:
            made = torch.empty_like(args[0], device="meta")
        if made is not None and made.numel() > UPLOADED_ENTRIES:
            return made
        return function(*args, **options)


@contextmanager
def _noting_reads(tape: GraphRecorder) -> Iterator[None]:
    """Record every device-to-host read, and return ones instead of the values.

    Operations that copy values to the host are replaced in torch's dispatcher. A dispatch mode could also intercept
    them, but under a mode torch replaces some views by other operations, and the graphs would differ from a run's.
    """

    def read_scalar(x: Tensor) -> Any:
        tape.host_read(*_calling_code(None))
        return torch.ones((), dtype=x.dtype).item()

    def read_copy(x: Tensor, **options: Any) -> Tensor:
        tape.host_read(*_calling_code(None))
        return torch.ones(x.shape, dtype=options.get("dtype") or x.dtype)

    def read_into(out: Tensor, x: Tensor, non_blocking: bool = False) -> Tensor:
        tape.host_read(*_calling_code(None))
        return out.fill_(1)

    def is_read_copy(x: Tensor, **options: Any) -> bool:
        return _is_device(x) and _is_host(options.get("device"))

    def is_read_into(out: Tensor, x: Tensor, non_blocking: bool = False) -> bool:
        return _is_device(x) and not _is_device(out)

    library = torch.library.Library("aten", "IMPL")
    try:
        _replace(library, "_local_scalar_dense", read_scalar, _is_device)
        _replace(library, "_to_copy", read_copy, is_read_copy)
        _replace(library, "copy_", read_into, is_read_into)
        yield
    finally:
        library._destroy()


def _replace(library: Any, name: str, read: Callable[..., Any], is_read: Callable[..., bool]) -> None:
    kernel = torch.library.get_kernel(f"aten::{name}", "XLA")

    def dispatch(keys: Any, *args: Any, **options: Any) -> Any:
        return read(*args, **options) if is_read(*args, **options) else kernel.call_boxed(keys, *args, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the replaced kernel
        library.impl(name, dispatch, "XLA", with_keyset=True, allow_override=True)


def _is_device(x: Tensor) -> bool:
    return x.device.type != "cpu"


def _is_host(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _calling_code(trace: TracebackType | None) -> tuple[str, int, str]:
    """File, line and function of the innermost call outside torch and torch-xla.

    Args:
        trace: Traceback of an error; None for the current stack.
    """
    stack = traceback.extract_stack() if trace is None else traceback.extract_tb(trace)
    vendors = (__file__, *(str(Path(str(sys.modules[name].__file__)).parent) for name in ("torch", "torch_xla")))
    at = next((call for call in reversed(stack) if not call.filename.startswith(vendors)), stack[-1])
    return at.filename, at.lineno or 0, at.name
