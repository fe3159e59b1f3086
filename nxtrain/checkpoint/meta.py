"""What a checkpoint says about itself beside its tensors: `meta.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from nxtrain.checkpoint.layout import META
from nxtrain.errors import CheckpointError
from nxtrain.family import ModelConfig, ModelFamily, find_family

FORMAT = 1


class Meta(BaseModel):
    """The state of a run that is not a tensor, and what is needed to make sense of the tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: int = FORMAT
    """Version of the layout of checkpoints."""
    step: int
    """Finished updates."""
    samples: int
    """Sequences consumed by them: where the data goes on."""
    tokens: int
    """Target tokens consumed by them."""
    seed: int
    """Seed of the run."""
    family: str
    """Model family."""
    config: dict[str, Any]
    """The family's configuration."""
    dtype: str
    """Torch's name of the parameters' type."""
    state_dtype: str = "float32"
    """The same of the optimizer's running means."""
    data_fingerprint: str = ""
    """Identity of the data."""
    config_fingerprint: str = ""
    """Identity of the configuration."""
    mesh: dict[str, int] = {}
    """Degrees of the run that wrote it, by axis; filled in by `save`."""
    kinds: tuple[str, ...] = ()
    """Kinds of tensors it holds; filled in by `save`."""

    def model(self) -> tuple[ModelFamily, ModelConfig]:
        """The family and the configuration of the model."""
        family = find_family(self.family)
        return family, family.config_type.model_validate(self.config)


def read_meta(path: Path) -> Meta:
    """Read the `meta.json` of a checkpoint.

    Raises:
        CheckpointError: It is absent, damaged, or of another format.
    """
    file = path / META
    try:
        meta = Meta.model_validate_json(file.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: cannot read {META}: {error.strerror}") from error
    except ValidationError as error:
        raise CheckpointError(f"{file} is damaged, or written by another version of nxtrain: {error}") from error
    if meta.format != FORMAT:
        raise CheckpointError(f"{file} has format {meta.format}; this nxtrain reads format {FORMAT}")
    return meta
