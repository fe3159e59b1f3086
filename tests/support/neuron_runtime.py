"""XLA:CPU in the place of Neuron's runtime, below torch-xla: its step marker, through which every graph goes.

Nothing runs but what a step boundary hands over. A value that the host asks for before a boundary would be a graph of
its own, and raises here.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType, TracebackType
from typing import Any

import torch

from nxtrain.backends.base import Backend
from nxtrain.backends.xla.graphs import hash_of, pending
from nxtrain.backends.xla.tracing import _told_reads

_BESIDE = "-anew"
"""Ending of the names of modules that are executed a second time."""


def replaced(package: str) -> list[str]:
    """Names that differ between the loaded modules of a package and their files, executed anew beside them."""
    loaded = {name: module for name, module in sys.modules.items() if name == package or name.startswith(f"{package}.")}
    return sorted(
        f"{name}.{at}"
        for name, module in loaded.items()
        for at in _differences(vars(module), vars(_anew(name, module)))
    )


def _anew(name: str, module: ModuleType) -> ModuleType:
    assert module.__file__ is not None, name
    alias = f"{name}{_BESIDE}"
    spec = importlib.util.spec_from_file_location(alias, module.__file__)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[alias] = made  # where dataclasses look
    try:
        spec.loader.exec_module(made)
    finally:
        del sys.modules[alias]
    return made


def _differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[str]:
    """Names whose values are others in one namespace than in another, or that one lacks; as dotted paths."""
    for name in sorted({*here, *there}):
        known = [names[name] for names in (here, there) if name in names]
        if name.startswith("__") and not any(isinstance(value, FunctionType) for value in known):
            continue
        if len(known) == 2:
            yield from (f"{name}{rest}" for rest in _unlike(*known))
        elif not isinstance(known[0], ModuleType):  # that became a package's when it was imported
            yield name


def _unlike(a: Any, b: Any) -> Iterator[str]:
    if a is b:
        return
    if inspect.isclass(a) and inspect.isclass(b) and f"{a.__module__}{_BESIDE}" == b.__module__:
        if _ancestors(a) != _ancestors(b):
            yield ""
        yield from (f".{name}" for name in _differences(vars(a), vars(b)))
    elif _codes(a) != _codes(b) or (not _codes(a) and _text(a) != _text(b)):
        yield ""


def _ancestors(of: type) -> list[str]:
    return [f"{each.__module__.removesuffix(_BESIDE)}.{each.__qualname__}" for each in of.__mro__]


def _codes(value: Any) -> list[tuple[CodeType, list[str]]]:
    """Code and defaults of whatever is called under a name."""
    if isinstance(value, property):
        return [code for part in (value.fget, value.fset) if part for code in _codes(part)]
    if isinstance(value, staticmethod | classmethod):
        return _codes(value.__func__)
    if isinstance(value, functools.cached_property):
        return _codes(value.func)
    if not isinstance(value, FunctionType):
        return []
    inner = _codes(value.__wrapped__) if hasattr(value, "__wrapped__") else []
    defaults = [*(value.__defaults__ or ()), *sorted((value.__kwdefaults__ or {}).items())]
    return [(value.__code__, [_text(default) for default in defaults]), *inner]


def _text(value: Any) -> str:
    """A constant's text, without the addresses of what has no other, and without the name of its module."""
    text = repr(value).replace(_BESIDE, "")
    return type(value).__qualname__ if " at 0x" in text else text


Meet = Callable[[str, Callable[[], str]], None]
"""Takes the hash of a graph, and what gives its HLO while this is called."""


class Runtime:
    """Function behind torch-xla's step marker; as a context, or for the rest of the process."""

    def __init__(self, meet: Meet, *, runs: bool, on_read: Callable[[str, int, str], None] | None = None) -> None:
        import torch_xla

        self._xla: Any = torch_xla._XLAC
        self._meet, self._runs, self._on_read = meet, runs, on_read
        self._stack = ExitStack()

    def start(self) -> None:
        """Take the marker's place."""
        self._marker = self._xla._xla_step_marker
        self._xla._xla_step_marker = self._mark
        self._xla._set_allow_execution(False)
        if not self._runs:
            self._stack.enter_context(_told_reads(self))

    def stop(self) -> None:
        """Give it back, with nothing pending."""
        self._stack.close()
        self._xla._clear_pending_irs("xla:0")
        self._xla._set_allow_execution(True)
        self._xla._xla_step_marker = self._marker

    def __enter__(self) -> Runtime:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def graph(self, hash_: str, text: Callable[[], str]) -> None:
        """A graph was handed over."""
        self._meet(hash_, text)

    def host_read(self, file: str, line: int, function: str) -> None:
        """The host asked for a value that no device has computed."""
        if self._on_read is not None:
            self._on_read(file, line, function)

    def _mark(self, device: str, devices: list[str], wait: bool = False, reset_scope: bool = True) -> None:
        self._show(device)
        if not self._runs:
            self._xla._clear_pending_irs(device)
            return
        self._xla._set_allow_execution(True)
        try:
            self._marker(device, devices, wait=wait, reset_scope=reset_scope)
        finally:
            self._xla._set_allow_execution(False)

    def _show(self, device: str) -> None:
        """Name the graph; what nobody else holds is no result of it, so the tensors stay in here."""
        computed = pending(torch.device(device))
        if computed:
            self.graph(hash_of(computed), lambda: str(self._xla._get_xla_tensors_hlo(computed)))


class Witness:
    """Reports once the classes of a process that trains, and what of their modules is replaced."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def testify(self) -> None:
        """Write it, at the first step boundary: the backend is open then."""
        backend = _at_its_boundary()
        if backend is None or self._file.exists():
            return
        from nxtrain.backends.neuron.backend import NeuronBackend, NeuronKernels
        from tests.support.neuron_runtime import replaced

        report = {
            "is NeuronBackend": type(backend) is NeuronBackend,
            "has NeuronKernels": type(backend.kernels) is NeuronKernels,
            "rounds": getattr(backend.kernels, "rounds", None),
            "notes": backend.notes(),
            "replaced": replaced("nxtrain.backends"),
        }
        self._file.write_text(json.dumps(report), encoding="utf-8")


def _at_its_boundary() -> Backend | None:
    """The backend whose step boundary is under way; None: something else hands over a graph."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "step_boundary" and isinstance(frame.f_locals.get("self"), Backend):
            found: Backend = frame.f_locals["self"]
            return found
        frame = frame.f_back
    return None
