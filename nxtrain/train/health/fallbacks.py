"""Detection of operations that the device lacks, and that its framework computes on the host at far lower speed."""

from __future__ import annotations

from rich.console import Console

from nxtrain.backends.base import Backend
from nxtrain.common.errors import BackendError
from nxtrain.common.process.console import standard_error
from nxtrain.metrics.run_observer import RunObserver, Work


class Fallbacks(RunObserver):
    """Observer that raises an error if operations of the first step ran on the host, or warns if `allowed`.

    Args:
        backend: This rank's device.
        allowed: True for a warning in place of an error (`compile.allow_fallbacks`).
        console: Console of the warning; None for standard error.
    """

    def __init__(self, backend: Backend, *, allowed: bool, console: Console | None = None) -> None:
        self._backend, self._allowed = backend, allowed
        self._console = console or standard_error()
        self._has_trained = False
        self._inside = False

    def enter(self, step: int, work: Work) -> None:
        self._settle()
        if work == "training" and not self._has_trained:
            self._backend.diagnostics.forget_fallbacks()
            self._has_trained = self._inside = True

    def finish(self, step: int) -> None:
        self._settle()

    def _settle(self) -> None:
        """Report the first step's operations on the host, if the first step has just ended."""
        if not self._inside:
            return
        self._inside = False
        operations = self._backend.diagnostics.fallbacks()
        if not operations:
            return
        problem = (
            f"{self._backend.name} computes {len(operations)} operations of a training step on the host, at many times "
            f"the cost of the device: {', '.join(operations)}"
        )
        if not self._allowed:
            raise BackendError(
                f"{problem}. Try compile.torch_compile=true, or set compile.allow_fallbacks=true to train anyway"
            )
        if self._backend.rank == 0:
            line = f"warning: {problem}, as compile.allow_fallbacks=true allows"
            self._console.print(line, style="yellow", markup=False)
