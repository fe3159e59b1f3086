"""Rules of a run's length: steps or epochs, and the schedules over these steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.config.bounds import MAX_INT
from nxtrain.config.rule_schedules import rule_schedule_problems
from nxtrain.config.schedule import schedule_problems
from nxtrain.config.schema import RunConfig


def duration(config: RunConfig, origins: Mapping[str, str]) -> Iterator[Problem]:
    """Check the number of steps and the schedules, and yield the problems.

    Args:
        config: The configuration.
        origins: Origin of each value that is set, by dotted key.
    """
    if config.train.epochs:
        yield from _epochs(config, origins)
    steps = config.train.steps
    if config.train.epochs:
        steps = 0
    yield from schedule_problems(config.optim, steps)
    yield from rule_schedule_problems(config.optim)


def with_epochs_as_steps(config: RunConfig, num_rows: int) -> RunConfig:
    """Configuration with `train.epochs` converted to steps, rounded up to whole updates; the epochs become 0.

    Args:
        config: The configuration, with `train.epochs` set.
        num_rows: Rows of the data.

    Raises:
        ConfigError: The steps do not fit the schedule, or are too many.
    """
    epochs = config.train.epochs
    steps = config.train.batch_sizes().steps_for(epochs * num_rows)
    if steps > MAX_INT:
        reason = f"{epochs:g} epochs of {num_rows:,} rows are more than {MAX_INT:,} steps"
        raise ConfigError([Problem("train.epochs", reason, hint="give fewer")])
    train = config.train.model_copy(update={"steps": steps, "epochs": 0.0})
    counted = config.model_copy(update={"train": train})
    problems = list(schedule_problems(counted.optim, steps))
    if problems:
        raise ConfigError(problems)
    return counted


def _epochs(config: RunConfig, origins: Mapping[str, str]) -> Iterator[Problem]:
    steps, epochs = (origins.get(f"train.{key}", "default") for key in ("steps", "epochs"))
    # A file names the steps of its own run, which epochs on the command line replace.
    if steps != "default" and not (epochs == "override" and steps != "override"):
        reason = (
            f"{config.train.epochs:g} epochs and train.steps={config.train.steps} ({steps}) are two lengths of a run"
        )
        yield Problem("train.epochs", reason, hint="give one of them; train.epochs=0 leaves the steps")
    is_packed_later = config.data.source == "arrow" and not config.finetune.compares  # rows of pairs are counted
    if is_packed_later or config.data.mixture:
        what = "data.mixture" if config.data.mixture else "data.source=arrow"
        reason = f"the rows of {what} are endless: they are packed or mixed while the run trains"
        hint = "give train.steps; tokens of the corpus / (train.global_batch * train.seq_len) is one epoch"
        yield Problem("train.epochs", reason, hint=f"{hint}, and nxtrain data inspect counts the tokens")
