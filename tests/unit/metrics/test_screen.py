"""A run outlives its screen."""

from __future__ import annotations

import errno
import io

import pytest
from rich.text import Text

from nxtrain.common.batch_sizes import BatchSizes
from nxtrain.common.process.console import PipeSafeConsole
from nxtrain.metrics.progress import ProgressBar
from nxtrain.metrics.status import Status


class Dead(io.StringIO):
    """A stream whose reader is gone."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.EIO, "input/output error")])
def test_what_cannot_be_shown_is_dropped(error: OSError) -> None:
    screen = PipeSafeConsole(file=Dead(error), force_terminal=True)
    for _ in range(2):
        screen.print("a line", style="yellow")
        screen.print(Text("another"))
    assert not screen._buffer
    bar = ProgressBar(Status(10, BatchSizes(1)), 10, 0, screen, clock=lambda: 0.0)
    bar.log({"step": 1, "loss": 1.0, "tokens_per_s": 2.0})
    bar.close()
