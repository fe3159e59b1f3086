"""The screen of a run, which the run outlives."""

from __future__ import annotations

from rich.console import Console


class Screen(Console):
    """A console whose reader may go: what cannot be shown is dropped, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Leave it to the writer, which drops what it was to show."""
        raise BrokenPipeError

    def _check_buffer(self) -> None:
        # All that rich shows passes here, the frames of a live bar too.
        try:
            super()._check_buffer()
        except OSError:
            del self._buffer[:]


def standard_error(*, quiet: bool = False) -> Screen:
    """Where lines for people go, each as it is.

    Args:
        quiet: Show nothing.
    """
    return Screen(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
