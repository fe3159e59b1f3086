"""Detection of a crash loop: a run whose starts all end at the same step with the same configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from nxtrain.common.errors import CrashLoopError
from nxtrain.common.run_folder import STARTS_FILE
from nxtrain.metrics.goodput import RunStart
from nxtrain.metrics.start_log import read


def fingerprint(config: str) -> str:
    """Fingerprint of a configuration's text."""
    return hashlib.sha256(config.encode()).hexdigest()[:16]


def refuse_crash_loop(logs: Path, config: str, most: int) -> None:
    """Refuse to start a run that has failed too often at the same step.

    Args:
        logs: Folder of the log of starts.
        config: Fingerprint of the configuration; failures under another configuration do not count.
        most: Failures in a row at one step; 0: never refuse.

    Raises:
        CrashLoopError: The last `most` starts failed at the same step with this configuration.
    """
    if not most:
        return
    last = failures(read(logs))[-most:]
    if len(last) < most or {(start.spent.step, start.config) for start in last} != {(last[-1].spent.step, config)}:
        return
    why = last[-1].why or "it said nothing, as if killed"
    raise CrashLoopError(
        f"the last {most} attempts of this run all ended after step {last[-1].spent.step}; of the last one is known: "
        f"{why}. A further one would likely end there too (recovery.max_same_step={most}). Mend the cause and "
        f"start again with another configuration, with recovery.max_same_step=0, or without {logs / STARTS_FILE}"
    )


def failures(starts: Sequence[RunStart]) -> list[RunStart]:
    """Starts since the last one that ended with `done` or was asked to stop."""
    failed: list[RunStart] = []
    for start in starts:
        if start.stop or start.outcome in {"done", "stopped"}:
            failed = []
        else:
            failed.append(start)
    return failed
