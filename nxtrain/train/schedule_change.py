"""Learning rate of a resumed run: warm-up after the checkpoint, and messages about changes of the schedule."""

from __future__ import annotations

from pydantic import ValidationError

from nxtrain.checkpoint.meta import Meta
from nxtrain.config.schedule import ScheduleConfig
from nxtrain.config.schema import RunConfig
from nxtrain.optim.schedule import Schedule

JUMP = 1.1
"""Ratio of consecutive learning rates above which a message warns of a jump."""


def with_rewarming(meta: Meta, config: RunConfig, *, is_own: bool) -> Meta:
    """Set the step after which the learning rate warms up again, in the metadata of a loaded checkpoint.

    Args:
        meta: Metadata of the checkpoint.
        config: Configuration of the run.
        is_own: The checkpoint is the newest of the same run, which may already be warming up again.
    """
    steps = config.optim.rewarm_steps
    if is_own and steps and meta.rewarm_after is not None and meta.settings.get("optim.rewarm_steps") == steps:
        return meta
    after = None
    if steps and meta.step:
        after = meta.step
    return meta.model_copy(update={"rewarm_after": after})


def rate_changes(meta: Meta, config: RunConfig) -> str:
    """Message about the learning rate after a resume; empty if the schedule equals that of the checkpoint's run.

    Args:
        meta: Metadata of the checkpoint, after `with_rewarming`.
        config: Configuration of the run.
    """
    here, step = Schedule.of(config, meta.rewarm_after), meta.step
    there = _schedule_there(meta)
    if not step or there is None:
        return ""
    old, new = there.at(step), here.at(step + 1)
    # The next step, and about 64 more steps up to the last.
    last = config.train.steps
    steps = (step + 1, *range(step + 2, last + 1, max(1, (last - step) // 64)), last)
    if all(there.at(later) == here.at(later) for later in steps):
        return ""
    line = f"the learning rate was {old:.3g} at step {step} and is {new:.3g} at step {step + 1}; "
    line += here.describe(after=step)
    if here.rewarm_after == step:
        return f"{line}; it rises from 0 until step {step + here.rewarm_steps} (optim.rewarm_steps)"
    if new > JUMP * old and there.at(step + 1) <= JUMP * old:
        return f"{line}. WARNING: it jumps up; optim.rewarm_steps=N lets it rise over N steps"
    return line


def _schedule_there(meta: Meta) -> Schedule | None:
    """Learning-rate schedule of the run that wrote the checkpoint; None if its settings are not recorded."""
    settings = {key.removeprefix("optim."): value for key, value in meta.settings.items()}
    keys = {key: settings[key] for key in ScheduleConfig.model_fields if key in settings}
    if "lr" not in keys:
        return None
    try:
        optim = ScheduleConfig.model_validate(keys)
    except ValidationError:  # of another version
        return None
    return Schedule.of_keys(optim, meta.settings.get("train.steps", optim.decay_steps), meta.rewarm_after)
