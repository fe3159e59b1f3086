"""Work that a disk or a store may keep waiting, away from the thread that watches."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Aside:
    """One call at a time, each in a thread that nobody waits for.

    Args:
        name: Of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Do some work, unless what was begun before is still under way.

        Raises:
            RuntimeError: The system has no thread to give.
        """
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=work, name=self._name, daemon=True)
            thread.start()
            self._thread = thread
