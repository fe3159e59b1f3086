"""Resolution of `model.hf` to a folder: a local folder, or downloaded files of a Hugging Face Hub repository.

A repository is pinned to a commit before the configuration is checked, and the run's `config.toml` records the commit.
The model's shape needs only `config.json`. The initial weights need the other files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nxtrain.common.errors import ConfigError, Problem, StorageError, cause_of
from nxtrain.common.hf_files import COMPANIONS, CONFIG, INDEX, TOKENIZER, WEIGHTS
from nxtrain.common.io.hub import SCHEME, HubName, is_offline, model_named
from nxtrain.common.io.regular import read_bytes
from nxtrain.common.process.console import standard_error
from nxtrain.common.process.placement import Placement
from nxtrain.common.run_folder import CONFIG_FILE
from nxtrain.common.text import listed
from nxtrain.config.load import load
from nxtrain.config.schema import RunConfig

KEY = "model.hf"


_PICKLED = (".bin", ".pth", ".pt")
"""Endings of files with pickled weights, which nxtrain does not read."""


def with_commit(config: RunConfig) -> RunConfig:
    """Pin `model.hf` to a commit if it names a repository of the Hub.

    A run continues with the commit in its `config.toml`, unless `model.hf` names a commit, or checkpoint.resume=never.

    Raises:
        ConfigError: The Hub has no such repository or revision for this user.
        StorageError: The Hub cannot be reached.
    """
    name = model_named(config.model.hf)
    if name is None or name.is_pinned:
        return config
    pinned = _recorded(config, name)
    if pinned is None:
        with _of_key(config.model.hf):
            pinned = name.pinned()
    elif name.revision:
        _print_line(
            f"model.hf={name}: the run continues with the commit in {config.run.dir / CONFIG_FILE}, "
            f"{pinned.revision}; for another commit, give its 40 digits"
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"hf": str(pinned)})})


def read_shape(text: str) -> Mapping[str, Any]:
    """Read the `config.json` of the model that `model.hf` names.

    Raises:
        ConfigError: There is no such folder or repository, or its `config.json` cannot be read.
        StorageError: The Hub cannot be reached.
    """
    name, folder = model_named(text), Path(text)
    if name is not None:
        with _of_key(text):
            folder = _shape_folder(name.pinned())
    path = folder / CONFIG
    try:
        config = json.loads(read_bytes(path))  # of bytes, since a text may begin with a byte order mark
    except OSError as error:
        hint = "model.hf is a folder with config.json and *.safetensors, or a repository of the Hub"
        if not folder.exists():
            hint = f"for a repository of the Hub, write model.hf={SCHEME}ORGANIZATION/NAME"
        raise ConfigError([Problem(KEY, f"cannot read {path}: {error.strerror}", hint=hint)]) from error
    except (RecursionError, ValueError) as error:
        raise ConfigError([Problem(KEY, f"{path} is not valid JSON: {cause_of(error)}")]) from error
    if not isinstance(config, dict):
        raise ConfigError([Problem(KEY, f"{path} holds no JSON object")])
    return config


def whole_folder(text: str, key: str = KEY) -> Path:
    """Folder with the shape, weights and tokenizer of a model; missing files of a Hub repository are downloaded.

    All ranks may call this at once. One rank of each machine downloads, and the others wait.

    Args:
        text: Path of a folder, or name of a repository.
        key: Key or argument that problems name; empty for none.

    Raises:
        ConfigError: There is no such repository, or it has no safetensors files.
        StorageError: The Hub cannot be reached, or the disk has not enough space.
    """
    name = model_named(text)
    if name is None:
        return Path(text)
    with _of_key(text, key):
        name = name.pinned()
        folder = name.folder
        weights = _weights_of(folder)
        if weights and all((folder / file).is_file() for file in (CONFIG, TOKENIZER, *weights)):
            return folder
        folder, sizes = _shape_folder(name), name.sizes()
        name.fetch({file: sizes[file] for file in (*COMPANIONS, INDEX) if file in sizes}, _print_line)
        weights = [WEIGHTS]
        if WEIGHTS not in sizes:  # transformers, too, reads a single file before an index
            weights = _weights_of(folder) or [WEIGHTS]
        absent = [file for file in weights if file not in sizes]
        if absent and not is_offline():
            raise _without_weights(name, absent[0], sizes)
        return name.fetch({file: sizes.get(file, 0) for file in weights}, _print_line)


def tokenizer_folder(text: str) -> Path:
    """Folder with the tokenizer of a model, given as a local folder or as a Hub repository.

    Raises:
        ConfigError: There is no such repository, or it has no `tokenizer.json`.
        StorageError: The Hub cannot be reached.
    """
    name = model_named(text)
    if name is None:
        return Path(text)
    with _of_key(text, ""):
        name = name.pinned()
        sizes = name.sizes()
        if TOKENIZER not in sizes:
            raise ConfigError([Problem("", f"{name} has no {TOKENIZER}, but {listed(sizes) or 'no file'}")])
        return name.fetch({file: sizes[file] for file in COMPANIONS if file in sizes}, _print_line)


def _recorded(config: RunConfig, name: HubName) -> HubName | None:
    """Repository at the commit in the run's `config.toml`; None if it records no commit of this repository."""
    if config.checkpoint.resume == "never":
        return None
    try:
        recorded = model_named(load(config.run.dir / CONFIG_FILE).config.model.hf)
    except ConfigError:  # no run has begun there, or one of another release
        return None
    if recorded is None or not recorded.is_pinned or recorded.repository != name.repository:
        return None
    return recorded


def _shape_folder(name: HubName) -> Path:
    """Folder of a commit in the Hub cache, with `config.json` downloaded."""
    if not (name.folder / CONFIG).is_file():
        sizes = name.sizes()
        if sizes and CONFIG not in sizes:
            hint = "take a repository in the format of transformers, with config.json and *.safetensors"
            raise ConfigError([Problem("", f"{name} has no {CONFIG}, but {listed(sizes) or 'no file'}", hint=hint)])
    return name.fetch({CONFIG: 0}, _print_line)


def _weights_of(folder: Path) -> list[str]:
    """Weight files of a model folder: the single file, or the files of the index; empty if unknown."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if not (folder / INDEX).is_file():
        return []
    try:
        files = json.loads(read_bytes(folder / INDEX))["weight_map"].values()
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / INDEX} is not an index of tensors and their files: {cause_of(error)}") from error
    return sorted({location for location in files if isinstance(location, str)})


def _without_weights(name: HubName, absent: str, sizes: Mapping[str, int]) -> ConfigError:
    pickled = [file for file in sizes if file.endswith(_PICKLED)]
    if pickled:
        reason = f"{name} has pickled weights, such as {pickled[0]}, and no {absent}"
        hint = "save them as safetensors first: AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(DIR)"
    else:
        reason = f"{name} has no {absent}, but {listed(sizes) or 'no file'}"
        hint = "take a repository with weights in safetensors"
    return ConfigError([Problem("", reason, hint=hint)])


@contextmanager
def _of_key(text: str, key: str = KEY) -> Iterator[None]:
    """Context that reports refusals of the Hub as problems of a configuration key."""
    try:
        yield
    except ConfigError as error:
        problems = [
            replace(problem, key=key, reason=f"{_not_here(text)}{problem.reason}") for problem in error.problems
        ]
        raise ConfigError(problems) from error
    except StorageError as error:
        raise StorageError(f"{_not_here(text)}{error}") from error


def _not_here(text: str) -> str:
    """Prefix of a message about a name that could also be a local path."""
    if text.startswith(SCHEME):
        return ""
    return f"no folder {text} is here, and "


def _print_line(line: str) -> None:
    standard_error(quiet=not Placement.read().speaks_for_node).print(line)
