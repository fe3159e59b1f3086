"""Verdict on a run's speed: the resource that limits the run, with the figures that show it."""

from __future__ import annotations

from collections.abc import Mapping

# Shares of the time from which an activity counts as the limit of a run.
BOUND_SHARE = 0.15  # an activity outside training steps, such as waiting for data
UPDATE_SHARE = 0.3  # the optimizer update, which is limited by reading and writing the state
LAUNCH_SHARE = 0.9  # the host's launching of operations on its device

HIGH_MFU = 0.3  # a run counts as compute-bound from this MFU; published runs of dense models reach 0.3 to 0.6
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
    """Name the resource that limits a run, such as `data-bound`, followed by a colon and the figures.

    The text is empty if there are no times.

    Args:
        times: Seconds by key of a metrics record, such as `data_s`; sections of the step are parts of `training_s`.
        mfu: Model FLOPs utilization of the run; None: unknown.
        intensities: Two numbers of FLOPs. The first is what the device computes while it reads one byte. The second is
            what a forward pass over a micro-batch computes per byte of weights.
        queues: The host queues operations for a device, so that the times are those of the host.
    """
    kinds = ("data_s", "training_s", "waiting_s", "log_s", *BOUND_BY)
    total_s = sum(times.get(kind, 0.0) for kind in kinds)
    if not total_s > 0:
        return ""
    share = {kind: times.get(kind, 0.0) / total_s for kind in (*kinds, "reduce_s", "optimizer_s")}
    if share["data_s"] >= BOUND_SHARE:
        return f"data-bound: {share['data_s']:.0%} of the time goes into waiting for data"
    reduced = 0.0  # a single rank reduces nothing
    if share["waiting_s"]:
        reduced = share["reduce_s"]
    if share["waiting_s"] + reduced >= BOUND_SHARE:
        why = f"{share['waiting_s']:.0%} of the time goes into waiting for other ranks"
        if reduced:
            why += f", {reduced:.0%} into reductions in addition"
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
