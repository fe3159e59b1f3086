"""XLA:CPU in the place of Neuron's runtime, below torch-xla: its step marker, through which every graph goes.

Nothing runs but what a step boundary hands over. A value that the host asks for before a boundary would be a graph of
its own, and raises here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from nxtrain.backends.base import Backend
from nxtrain.backends.xla.graphs import hash_of, pending
from nxtrain.backends.xla.tracing import _noting_reads

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
        self._marker = self._xla._xla_step_marker
        self._xla._xla_step_marker = self._mark
        self._xla._set_allow_execution(False)
        if not self._runs:
            self._stack.enter_context(_noting_reads(self))

    def stop(self) -> None:
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
        """Name the graph; what nobody else holds is not a result of it, so the tensors stay in here."""
        computed = pending(torch.device(device))
        if computed:
            self.graph(hash_of(computed), lambda: str(self._xla._get_xla_tensors_hlo(computed)))


class Witness:
    """Reports once the classes of a process that trains."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def testify(self) -> None:
        """Write it, at the first step boundary: the backend is open then."""
        backend = _at_its_boundary()
        if backend is None or self._file.exists():
            return
        from nxtrain.backends.neuron.backend import NeuronBackend, NeuronKernels

        report = {
            "is NeuronBackend": type(backend) is NeuronBackend,
            "has NeuronKernels": type(backend.kernels) is NeuronKernels,
            "rounds": getattr(backend.kernels, "rounds", None),
            "notes": backend.notes(),
        }
        self._file.write_text(json.dumps(report), encoding="utf-8")


def _at_its_boundary() -> Backend | None:
    """The backend whose step boundary is under way; None: something else hands over a graph."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "step_boundary" and isinstance(frame.f_locals.get("self"), Backend):
            result: Backend = frame.f_locals["self"]
            return result
        frame = frame.f_back
    return None
