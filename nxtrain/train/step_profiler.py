"""Profile of some steps on chosen ranks by torch's profiler, with a span for each step and each kind of work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from nxtrain.backends.base import Backend
from nxtrain.common.errors import cause_of
from nxtrain.common.run_folder import PROFILES_DIR
from nxtrain.metrics.run_observer import Outcome, RunObserver, Section, Work

_STEP = 0
"""Depth of a step's span in the stack of open profiler spans."""
_WORK = 1
"""Depth of the span of a kind of work in the stack of open profiler spans."""
_SECTION = 2
"""Depth of the span of a section of work in the stack of open profiler spans."""


class StepProfiler(RunObserver):
    """Profiler of some steps of one rank; in all other steps it costs one comparison per kind of work.

    The trace file opens in Perfetto and in chrome://tracing. A start that ends within the profiled steps writes the
    part that it has.

    Args:
        first, last: First and last step that are profiled.
        logs: Folder of the run's logs.
        rank: This rank.
        print_line: Prints a message.
        backend: Device whose activity and memory are recorded too, if the backend supports it; None for the host only.
    """

    def __init__(
        self,
        first: int,
        last: int,
        logs: Path,
        rank: int,
        print_line: Callable[[str], None],
        backend: Backend | None = None,
    ) -> None:
        self._steps = range(first, last + 1)
        self._file = logs / PROFILES_DIR / f"rank-{rank:05d}-steps-{first}-{last}.json.gz"
        self._print_line, self._backend = print_line, backend
        self._profile: Any = None
        self._open: list[Any] = []
        self._step = 0

    def enter(self, step: int, work: Work) -> None:
        if self._profile is None:
            if step not in self._steps:
                return
            self._start()
        if step != self._step:
            self._close(_STEP)
            self._begin(f"nxtrain.step {step}")
            self._step = step
        self._close(_WORK)
        self._begin(f"nxtrain.{work}")

    def _start(self) -> None:
        options: dict[str, Any] = {"activities": supported_activities() or [ProfilerActivity.CPU]}
        if self._backend is not None:
            of_device, line = self._backend.diagnostics.profiler_options(self._file.parent)
            options |= of_device
            if line:
                self._print_line(line)
        self._profile = profile(**options)
        self._profile.start()
        if self._backend is not None:
            self._backend.diagnostics.watch_memory()

    def section(self, name: Section) -> None:
        if self._profile is not None:
            self._close(_SECTION)
            self._begin(f"nxtrain.{name}")

    def finish(self, step: int) -> None:
        self._close(_WORK)
        if self._profile is not None and step >= self._steps[-1]:
            self._write()

    def end(self, outcome: Outcome, why: str) -> None:
        if self._profile is not None:
            self._write()

    def _begin(self, name: str) -> None:
        span = record_function(name)
        span.__enter__()
        self._open.append(span)

    def _close(self, depth: int) -> None:
        """Close the open spans at a depth and all spans inside them."""
        while len(self._open) > depth:
            self._open.pop().__exit__(None, None, None)

    def _write(self) -> None:
        self._close(_STEP)
        profiled, self._profile = self._profile, None
        self._steps = range(0)
        if self._backend is not None:
            self._backend.diagnostics.finish_profiled()
        profiled.stop()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            profiled.export_chrome_trace(str(self._file))
            memory = self._file.with_name(self._file.name.replace(".json.gz", "-memory.pickle"))
            if self._backend is not None and self._backend.diagnostics.dump_memory(memory):
                self._print_line(f"memory of these steps: {memory}, for pytorch.org/memory_viz")
        except (OSError, RuntimeError) as error:  # a disk that fails must not end the run
            self._print_line(f"warning: the profile cannot be written: {cause_of(error)}; training goes on")
        else:
            self._print_line(f"profile: {self._file}")
