"""What the watchdog's thread outlives."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

DEAD_SCREEN = """
import os
reader, writer = os.pipe()
os.dup2(writer, 2)
os.close(writer)
os.close(reader)
"""


def code(body: str) -> int:
    """Exit code of a process whose standard error nobody reads."""
    environment = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    return subprocess.run([sys.executable, "-c", DEAD_SCREEN + body], env=environment, timeout=60).returncode


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("from nxtrain.train.recovery.watchdog import _say\n_say('a line')\nos._exit(5)", 5),
        (
            "from nxtrain.train.recovery.signals import Signals\n"
            "signals = Signals()\nsignals.note(15)\nsignals._asked_at -= 2\nsignals.note(10)\n",
            128 + 10,
        ),
    ],
)
def test_a_screen_that_is_gone_ends_no_thread(body: str, expected: int) -> None:
    assert code(body) == expected
