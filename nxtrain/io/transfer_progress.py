"""How much of checkpoints has come or gone, by which those who wait for slow storage know that it lives."""

from __future__ import annotations

from threading import Lock


class Arrivals:
    """Bytes that files and stores have given or taken, of all threads: where one is slow, a sign that it lives."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_bytes = 0

    def note(self, num_bytes: int) -> None:
        """Count bytes."""
        with self._lock:
            self._num_bytes += num_bytes

    def __call__(self) -> int:
        """How many came."""
        return self._num_bytes


arrived = Arrivals()
"""Those of this process."""
