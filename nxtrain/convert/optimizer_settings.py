"""The optimizer's settings after a checkpoint, for who continues it elsewhere."""

from __future__ import annotations

from pathlib import Path

from nxtrain.checkpoint.meta import read_meta
from nxtrain.checkpoint.mirror import resolve
from nxtrain.config import check
from nxtrain.config.load import load
from nxtrain.convert.nxd_write import Rates
from nxtrain.errors import ConfigError
from nxtrain.optim.schedule import Schedule
from nxtrain.run_folder import CONFIG_FILE


def rates_of(checkpoint: Path | str, file: Path | None) -> Rates:
    """What the next update would be told; a checkpoint keeps nothing of it.

    Args:
        checkpoint: A checkpoint, or a `checkpoints` or run folder; or its address in S3.
        file: Configuration of its run; None: the one in the folder of the run, on a disk.

    Raises:
        CheckpointError: There is no such checkpoint.
        ConfigError: There is no configuration, or none that is valid.
    """
    path = resolve(checkpoint)
    if file is None and isinstance(path, Path):
        file = path.parent.parent / CONFIG_FILE
    if file is None or not file.is_file():
        raise ConfigError(
            f"{path} keeps no settings of the optimizer, and there is no {file or f'{CONFIG_FILE} with it'}; name the "
            "configuration of its run: --run CONFIG, or take the weights alone: --weights-only"
        )
    plan = check.resolve(load(file), world=None)
    return Rates(plan.config.optim, Schedule.of(plan.config).at(read_meta(path).step + 1))
