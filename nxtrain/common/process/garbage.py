"""Settings of Python's garbage collector for a fast start, since imports create many objects that are never garbage.

With its usual thresholds, the collector visits hundreds of thousands of objects dozens of times during the import of
torch. It visits them once more at the end of the process. That is a quarter of the CPU time of a short run.
"""

from __future__ import annotations

import atexit
import gc
import sys

STARTING = 1_000_000
"""Number of new containers before the first collection of a starting process, about three times that of its imports."""

_USUAL = gc.get_threshold()


def collect_rarely() -> None:
    """Collect garbage rarely until `settle` is called, and skip the collection at the end of the process.

    A program calls this before its imports.
    """
    gc.set_threshold(STARTING, *_USUAL[1:])
    atexit.register(_skip_last_collection)


def settle() -> None:
    """Return to the usual garbage collection after the start, and exclude the imported objects from collections.

    Has no effect in a process that did not call `collect_rarely`.
    """
    if gc.get_threshold()[0] == STARTING:
        gc.freeze()
        gc.set_threshold(*_USUAL)


def _skip_last_collection() -> None:
    """Exclude all objects from the collection at the end of the process; Triton's bindings need this collection.

    Triton 3.9 is bound by nanobind, which prints lines about objects that outlive the interpreter.
    """
    if "triton" in sys.modules:
        gc.unfreeze()
    else:
        gc.freeze()
