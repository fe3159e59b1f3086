"""Rules of a run's length: steps or epochs, and the learning rate's course over them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.config.bounds import MAX_INT
from nxtrain.config.schema import RunConfig


def duration(config: RunConfig, origins: Mapping[str, str]) -> Iterator[Problem]:
    """Problems of the number of steps and of the schedule.

    Args:
        config: The configuration.
        origins: Origin of each value that is set, by dotted key.
    """
    if config.train.epochs:
        yield from _epochs(config, origins)
    if not config.train.epochs or config.optim.decay_steps:
        yield from _schedule(config)
    optim = config.optim
    if optim.schedule == "cosine" and optim.min_lr > optim.lr:
        reason = f"min_lr={optim.min_lr} exceeds lr={optim.lr}"
        yield Problem("optim.min_lr", reason, hint=f"use optim.min_lr={optim.lr / 10} or less than lr")


def with_epochs_as_steps(config: RunConfig, num_rows: int) -> RunConfig:
    """Configuration whose steps see every row `train.epochs` times or a little more; the epochs become 0.

    Args:
        config: The configuration, with epochs.
        num_rows: Rows of the data.

    Raises:
        ConfigError: The steps do not fit the schedule, or are too many.
    """
    epochs, global_batch = config.train.epochs, config.train.global_batch
    steps = math.ceil(epochs * num_rows / global_batch)
    if steps > MAX_INT:
        reason = f"{epochs:g} epochs of {num_rows:,} rows are more than {MAX_INT:,} steps"
        raise ConfigError([Problem("train.epochs", reason, hint="give fewer")])
    train = config.train.model_copy(update={"steps": steps, "epochs": 0.0})
    counted = config.model_copy(update={"train": train})
    problems = list(_schedule(counted))
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
        reason = f"the rows of {what} have no end: they are packed, or drawn by shares, while the run goes on"
        hint = "give train.steps; tokens of the corpus / (train.global_batch * train.seq_len) is one epoch"
        yield Problem("train.epochs", reason, hint=f"{hint}, and nxtrain data inspect counts the tokens")


def _schedule(config: RunConfig) -> Iterator[Problem]:
    optim = config.optim
    end = optim.decay_steps or config.train.steps
    if optim.warmup_steps > end:
        name = "optim.decay_steps" if optim.decay_steps else "train.steps"
        hint = "use fewer, or set optim.decay_steps to the length of the whole run that these steps begin"
        yield Problem("optim.warmup_steps", f"{optim.warmup_steps} exceeds {name}={end}", hint=hint)
