"""Garbage collection in processes whose imports make hundreds of thousands of objects, none of them garbage.

With its usual thresholds, the collector visits these objects dozens of times while torch is imported, and once more at
the end of the process. That is a quarter of the CPU time of a short run.
"""

from __future__ import annotations

import atexit
import gc

STARTING = 1_000_000
"""New containers before a starting process collects first, about three times as many as the imports of a run make."""

_USUAL = gc.get_threshold()


def collect_rarely() -> None:
    """Collect rarely until `settle`, and leave objects that are alive at the end to the operating system.

    A program calls this before its imports.
    """
    gc.set_threshold(STARTING, *_USUAL[1:])
    atexit.register(gc.freeze)


def settle() -> None:
    """End the start of this process: collect as usual, without visiting the imported objects.

    Nothing changes in a process that did not call `collect_rarely`.
    """
    if gc.get_threshold()[0] == STARTING:
        gc.freeze()
        gc.set_threshold(*_USUAL)
