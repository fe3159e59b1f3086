"""Model family and model configuration of a checkpoint or Hugging Face folder, read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nxtrain.checkpoint import directory
from nxtrain.checkpoint.meta import read_meta
from nxtrain.common.errors import ConfigError, NxtrainError, cause_of
from nxtrain.common.family import ModelConfig, ModelFamily, find_family
from nxtrain.common.hf_files import CONFIG, GENERATION_CONFIG
from nxtrain.common.io.object_store import Location, content_of, location_of


def is_hf_folder(location: Path, config: str = CONFIG) -> bool:
    """Return True if a path is a folder in Hugging Face's format and not a checkpoint.

    Args:
        config: Name of the configuration file that such a folder has.
    """
    try:
        return (location / config).is_file() and not directory.is_checkpoint(location)
    except OSError:  # reported by the code that reads the folder
        return False


def read_hf(location: Path) -> tuple[ModelFamily, ModelConfig, frozenset[int]]:
    """Read family, model configuration and end-of-text ids from a Hugging Face folder.

    Raises:
        ConfigError: The folder's `config.json` is invalid.
    """
    try:
        content: Mapping[str, Any] = json.loads(content_of(location / CONFIG))
        family = find_family(str(content["model_type"]))
        ends = _ends_of(content) | generation_ends(location)
        return family, family.from_hf(content), ends
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        reason = repr(error)
        if isinstance(error, RecursionError | ValueError):
            reason = cause_of(error)
        raise ConfigError(f"{location / CONFIG} is not a configuration of a model: {reason}") from error


def generation_ends(location: Location) -> frozenset[int]:
    """Ids at which transformers ends a text, from the `generation_config.json` of a folder; empty without the file.

    Raises:
        ConfigError: The file is invalid.
    """
    file = location / GENERATION_CONFIG
    if not file.is_file():
        return frozenset()
    try:
        return _ends_of(json.loads(content_of(file)))
    except (AttributeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{file} is not a configuration of Hugging Face: {cause_of(error)}") from error


def _ends_of(content: Mapping[str, Any]) -> frozenset[int]:
    """End-of-text ids in a configuration of Hugging Face."""
    ends = content.get("eos_token_id")
    if not isinstance(ends, list):
        ends = [ends]
    return frozenset(token for token in ends if isinstance(token, int))


def local_shape(address: str) -> tuple[ModelFamily, ModelConfig] | None:
    """Read family and configuration of a model in local storage; None for a bucket or an unreadable model."""
    try:
        location = location_of(address)
        if not isinstance(location, Path):
            return None
        if is_hf_folder(location):
            family, config, _ = read_hf(location)
            return family, config
        return read_meta(directory.find_checkpoint(location)).model()
    except (NxtrainError, OSError, ValueError):  # reported by the command that opens the model
        return None
