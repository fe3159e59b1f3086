"""Verdict on a run's time: the resource that limits the run, with the figures."""

from __future__ import annotations

from collections.abc import Mapping

# Share of the time from which a kind of work limits a run. An update multiplies no matrices.
BOUND_SHARE = 0.15  # a kind of work other than steps
UPDATE_SHARE = 0.3  # reading and writing the state
LAUNCH_SHARE = 0.9  # a host that issues work for its device

HIGH_MFU = 0.3  # MFU from which a run counts as limited by arithmetic: published runs of dense models reach 0.3 to 0.6
UNDECIDED = "bound by its steps"  # verdict on a run whose device has an unknown peak

BOUND_BY = {
    "evaluation_s": ("evaluation-bound", "evaluation"),
    "checkpoint_s": ("checkpoint-bound", "checkpoints"),
    "vote_s": ("vote-bound", "comparing replicas"),
}


def verdict(
    times: Mapping[str, float],
    *,
    mfu: float | None = None,
    intensities: tuple[float, float] | None = None,
    queues: bool = False,
) -> str:
    """Judge times by kind of work: a name such as `data-bound`, a colon, and the figures; empty without times.

    Args:
        times: Seconds under the keys of a record, such as `data_s`; sections of the step are parts of `training_s`.
        intensities: Operations that the device can do while it reads a byte, and operations for each byte of the
            weights that a pass over a micro-batch reads.
        queues: The host queues work for a device, and the times are the host's.
    """
    kinds = ("data_s", "training_s", "waiting_s", "log_s", *BOUND_BY)
    total_s = sum(times.get(kind, 0.0) for kind in kinds)
    if not total_s > 0:
        return ""
    share = {kind: times.get(kind, 0.0) / total_s for kind in (*kinds, "reduce_s", "optimizer_s")}
    if share["data_s"] >= BOUND_SHARE:
        return f"data-bound: {share['data_s']:.0%} of the time goes into waiting for data"
    reduced = 0.0  # a lone rank reduces nothing
    if share["waiting_s"]:
        reduced = share["reduce_s"]
    if share["waiting_s"] + reduced >= BOUND_SHARE:
        why = f"{share['waiting_s']:.0%} of the time goes into waiting for other ranks"
        if reduced:
            why += f", {reduced:.0%} into reductions beside that"
        return f"communication-bound: {why}"
    worst = max(BOUND_BY, key=share.__getitem__)
    if share[worst] >= BOUND_SHARE:
        name, work = BOUND_BY[worst]
        return f"{name}: {share[worst]:.0%} of the time goes into {work}"

    # The time goes into steps.
    if queues and share["training_s"] >= LAUNCH_SHARE:
        why = f"the host issues work for {share['training_s']:.0%} of the time, and waits {share['log_s']:.1%} for it"
        return f"launch-bound: {why}"
    if "optimizer_s" in times and share["optimizer_s"] >= UPDATE_SHARE:
        why = f"{share['optimizer_s']:.0%} of the time goes into the update, which reads and writes all state"
        return f"memory-bound: {why}; a larger train.global_batch has fewer updates"
    shares = f"{share['training_s'] + share['log_s']:.0%} of the time goes into steps"
    shares += f", {share['data_s']:.1%} into waiting for data"
    if mfu is not None:
        shares += f"; MFU {mfu:.1%}"
    if intensities is not None and intensities[1] < intensities[0]:
        device, run = intensities
        why = f"{run:.0f} operations for a byte of weights, and the device does {device:.0f}"
        return f"memory-bound: a micro-batch has {why} while it reads one; {shares}"
    if intensities is not None or (mfu or 0.0) >= HIGH_MFU:
        return f"compute-bound: {shares}"
    return f"{UNDECIDED}: {shares}; arithmetic or memory, which the peak of the device would tell"
