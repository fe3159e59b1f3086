"""The optimizer's settings after a checkpoint, for who continues it elsewhere."""

from __future__ import annotations

from pathlib import Path

from nxtrain.checkpoint import layout
from nxtrain.checkpoint.meta import read_meta
from nxtrain.checkpoint.nxd_write import Rates
from nxtrain.config.check import resolve
from nxtrain.config.load import load
from nxtrain.errors import ConfigError
from nxtrain.train.run import CONFIG_FILE, schedule_of


def rates_of(checkpoint: Path, file: Path | None) -> Rates:
    """What the next update would be told; a checkpoint keeps nothing of it.

    Args:
        checkpoint: A checkpoint, or a `checkpoints` or run folder.
        file: Configuration of its run; None: the one in the folder of the run.

    Raises:
        CheckpointError: There is no such checkpoint.
        ConfigError: There is no configuration, or none that is valid.
    """
    path = layout.resolve(checkpoint)
    file = file or path.parent.parent / CONFIG_FILE
    if not file.is_file():
        raise ConfigError(
            f"{path} keeps no settings of the optimizer, and there is no {file}; name the configuration of its run: "
            "--run CONFIG, or take the weights alone: --weights-only"
        )
    plan = resolve(load(file), world=None)
    return Rates(plan.config.optim, schedule_of(plan).at(read_meta(path).step + 1))
