"""Background tasks in daemon threads, which the end of the process does not wait for."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundTask(Thread, Generic[T]):
    """A function call in a daemon thread, with its result or error."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        super().__init__(name=name, daemon=True)
        self._work: Callable[[], T] | None = work
        self._results: list[T] = []
        self._error: BaseException | None = None
        self.done = False

    def run(self) -> None:
        """Run the function: in the thread after `start`, or in the caller's thread if called directly."""
        try:
            assert self._work is not None
            self._results.append(self._work())
        except BaseException as error:  # `result` raises it
            self._error = error
        self._work = None  # work that waited for an earlier task must not keep all tasks in memory
        self.done = True

    def result(self) -> T:
        """Wait for the end of the task; return its result, or raise its error."""
        if self.is_alive():
            self.join()
        if self._error is not None:
            raise self._error
        return self._results[0]
