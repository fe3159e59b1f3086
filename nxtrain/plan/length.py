"""Conversion of epochs to steps for a planned run."""

from __future__ import annotations

from dataclasses import replace

from nxtrain.common.errors import DataError, StorageError
from nxtrain.common.run_folder import DATA_DIR
from nxtrain.config.duration import with_epochs_as_steps
from nxtrain.config.schema import RunConfig
from nxtrain.plan.predict import Assumptions


def with_length(config: RunConfig, vocab_size: int, assumed: Assumptions) -> tuple[RunConfig, Assumptions, str]:
    """Convert the epochs of a configuration to steps, by counting the rows of its data.

    If the rows are not counted yet, the returned assumptions have the reason.

    Args:
        config: Configuration of the run.
        vocab_size: Entries of the model's vocabulary.
        assumed: Assumptions of the prediction; a length among them replaces the epochs.

    Returns:
        The configuration, the assumptions, and a message about the steps, which may be empty.

    Raises:
        ConfigError: The steps do not fit the schedule, or are too many.
    """
    epochs = config.train.epochs
    if not epochs or assumed.tokens or assumed.device_hours:
        return config, assumed, ""
    from nxtrain.data.dataset import count_rows

    try:
        num_rows, file = count_rows(config.data, config.train.seq_len, vocab_size, config.run.dir / DATA_DIR)
    except (DataError, StorageError) as error:
        way_out = "give train.steps=... with train.epochs=0, or --tokens, for days and cost"
        reason = f"train.epochs={epochs:g} is of unknown length, since no rows are counted yet: {error}; {way_out}"
        return config, replace(assumed, unknown_length=reason), ""
    counted = with_epochs_as_steps(config, num_rows)
    return counted, assumed, f"{epochs:g} epochs of {num_rows:,} rows in {file}: train.steps={counted.train.steps}"
