"""Verdict on a run's time: the resource that limits the run, with the figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BOUND_SHARE = 0.15
"""Share of the time from which a kind of work other than steps limits a run."""

UPDATE_SHARE = 0.3
"""Share of the time from which reading and writing the state limits a run: an update multiplies no matrices."""

HIGH_MFU = 0.3
"""MFU from which a run counts as limited by arithmetic: published runs of dense models reach 0.3 to 0.6."""

LAUNCH_SHARE = 0.9
"""Share of the time from which a host that issues work limits its device."""

UNDECIDED = "bound by its steps"
"""Verdict on a run whose device has an unknown peak."""

BOUND_BY = {
    "evaluation_s": ("evaluation-bound", "evaluation"),
    "checkpoint_s": ("checkpoint-bound", "checkpoints"),
    "vote_s": ("vote-bound", "comparing replicas"),
}


@dataclass(frozen=True)
class Balance:
    """Arithmetic of a machine and of the run on it.

    Args:
        machine: Operations that a device can do while it reads a byte.
        run: Operations for each byte of the weights that a pass over a micro-batch reads.
    """

    machine: float
    run: float


@dataclass(frozen=True)
class TimeVerdict:
    """Limit of a run.

    Args:
        name: `data-bound`, `communication-bound`, `memory-bound`, `compute-bound` and so on.
        why: Figures that show the limit.
    """

    name: str
    why: str

    def __str__(self) -> str:
        """One sentence."""
        return f"{self.name}: {self.why}"


def verdict(
    times: Mapping[str, float], *, mfu: float | None = None, balance: Balance | None = None, queues: bool = False
) -> TimeVerdict | None:
    """Judge times by kind of work; None without times.

    Args:
        times: Seconds under the keys of a record, such as `data_s`; sections of the step are parts of `training_s`.
        queues: The host queues work for a device, and the times are the host's.
    """
    kinds = ("data_s", "training_s", "waiting_s", "log_s", *BOUND_BY)
    total_s = sum(times.get(kind, 0.0) for kind in kinds)
    if not total_s > 0:
        return None
    share = {kind: times.get(kind, 0.0) / total_s for kind in (*kinds, "reduce_s", "optimizer_s")}
    if share["data_s"] >= BOUND_SHARE:
        return TimeVerdict("data-bound", f"{share['data_s']:.0%} of the time goes into waiting for data")
    reduced = 0.0  # a lone rank reduces nothing
    if share["waiting_s"]:
        reduced = share["reduce_s"]
    if share["waiting_s"] + reduced >= BOUND_SHARE:
        why = f"{share['waiting_s']:.0%} of the time goes into waiting for other ranks"
        if reduced:
            why += f", {reduced:.0%} into reductions beside that"
        return TimeVerdict("communication-bound", why)
    worst = max(BOUND_BY, key=share.__getitem__)
    if share[worst] >= BOUND_SHARE:
        name, work = BOUND_BY[worst]
        return TimeVerdict(name, f"{share[worst]:.0%} of the time goes into {work}")
    return _of_steps(times, share, mfu, balance, queues=queues)


def _of_steps(
    times: Mapping[str, float],
    share: Mapping[str, float],
    mfu: float | None,
    balance: Balance | None,
    *,
    queues: bool,
) -> TimeVerdict:
    """Verdict on a run whose time goes into its steps."""
    steps = f"{share['training_s'] + share['log_s']:.0%} of the time goes into steps"
    shares = f"{steps}, {share['data_s']:.1%} into waiting for data"
    if mfu is not None:
        shares += f"; MFU {mfu:.1%}"
    if queues and share["training_s"] >= LAUNCH_SHARE:
        why = f"the host issues work for {share['training_s']:.0%} of the time, and waits {share['log_s']:.1%} for it"
        return TimeVerdict("launch-bound", why)
    if "optimizer_s" in times and share["optimizer_s"] >= UPDATE_SHARE:
        why = f"{share['optimizer_s']:.0%} of the time goes into the update, which reads and writes all state"
        return TimeVerdict("memory-bound", f"{why}; a larger train.global_batch has fewer updates")
    if balance is not None and balance.run < balance.machine:
        why = f"{balance.run:.0f} operations for a byte of weights, and the device does {balance.machine:.0f}"
        return TimeVerdict("memory-bound", f"a micro-batch has {why} while it reads one; {shares}")
    if balance is not None or (mfu or 0.0) >= HIGH_MFU:
        return TimeVerdict("compute-bound", shares)
    return TimeVerdict(UNDECIDED, f"{shares}; arithmetic or memory, which the peak of the device would tell")
