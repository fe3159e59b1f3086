"""Console of a run, which goes on when its reader closes it."""

from __future__ import annotations

from rich.console import Console


class PipeSafeConsole(Console):
    """A rich console that drops its output when its pipe is closed, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError, which `_check_buffer` turns into dropped output."""
        raise BrokenPipeError

    def _check_buffer(self) -> None:
        # All output of rich passes here, frames of a live bar too.
        try:
            super()._check_buffer()
        except OSError:
            del self._buffer[:]


def standard_error(*, quiet: bool = False) -> PipeSafeConsole:
    """Console on standard error for messages to people, without wrapping or highlighting.

    Args:
        quiet: Show nothing.
    """
    return PipeSafeConsole(stderr=True, highlight=False, soft_wrap=True, quiet=quiet)
