"""Optimizer settings of a checkpoint's run, for conversion to another trainer's format."""

from __future__ import annotations

from pathlib import Path

from nxtrain.checkpoint.convert.nxd_write import OptimizerSettings
from nxtrain.checkpoint.meta import read_meta
from nxtrain.checkpoint.mirror import locate_checkpoint
from nxtrain.common.errors import ConfigError
from nxtrain.common.run_folder import CONFIG_FILE
from nxtrain.config import check
from nxtrain.config.load import load
from nxtrain.optim.schedule import Schedule


def optimizer_settings_of(checkpoint: Path | str, file: Path | None) -> OptimizerSettings:
    """Settings of the next update, from the run's configuration; a checkpoint does not hold them.

    Args:
        checkpoint: A checkpoint, or a `checkpoints` or run folder; or the address of one in S3.
        file: Configuration of the run; None: the file in the folder of the run, which must be on a disk.

    Raises:
        CheckpointError: The checkpoint is missing.
        ConfigError: The configuration is missing or invalid.
    """
    path = locate_checkpoint(checkpoint)
    if file is None and isinstance(path, Path):
        file = path.parent.parent / CONFIG_FILE
    if file is None or not file.is_file():
        raise ConfigError(
            f"{path} keeps no settings of the optimizer, and there is no {file or f'{CONFIG_FILE} with it'}; name the "
            "configuration of its run: --run CONFIG, or take the weights alone: --weights-only"
        )
    plan = check.resolve_config(load(file), world=None)
    return OptimizerSettings(plan.config.optim, Schedule.of(plan.config).at(read_meta(path).step + 1))
