"""Model folder of a configuration: a folder of this machine, or files of a repository of the Hugging Face Hub.

`model.hf` names either. A repository is pinned to a commit before the configuration is checked, and the run's
`config.toml` records the commit. The shape needs `config.json` alone; the first weights need the other files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from nxtrain.common.errors import ConfigError, Problem, StorageError, cause_of
from nxtrain.common.io.hub import SCHEME, HubName, is_offline, model_named
from nxtrain.common.io.regular import read_bytes
from nxtrain.common.process.console import standard_error
from nxtrain.common.process.placement import Placement
from nxtrain.common.run_folder import CONFIG_FILE
from nxtrain.common.text import listed
from nxtrain.config.load import load
from nxtrain.config.schema import RunConfig

KEY = "model.hf"

SHAPE = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"

COMPANIONS = (
    "generation_config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""Files next to the weights of a Hugging Face folder, without `config.json`."""

_PICKLED = (".bin", ".pth", ".pt")
"""Most files that a message names."""


def with_commit(config: RunConfig) -> RunConfig:
    """Pin `model.hf` to a commit, if `model.hf` names a repository of the Hub.

    A run goes on with the commit that its `config.toml` records, unless a commit is named, or checkpoint.resume=never.

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
            f"model.hf={name}: the run goes on with the commit that {config.run.dir / CONFIG_FILE} records, "
            f"{pinned.revision}; for another, name its 40 digits"
        )
    return config.model_copy(update={"model": config.model.model_copy(update={"hf": str(pinned)})})


def read_shape(text: str) -> Mapping[str, Any]:
    """Content of the `config.json` of a value of `model.hf`.

    Raises:
        ConfigError: There is no such folder or repository, or its `config.json` cannot be read.
        StorageError: The Hub cannot be reached.
    """
    name, folder = model_named(text), Path(text)
    if name is not None:
        with _of_key(text):
            folder = _shape_folder(name.pinned())
    path = folder / SHAPE
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
    """Folder with shape, weights and tokenizer of a model; what a repository of the Hub lacks here is fetched.

    All ranks may call this at once: one rank of each machine fetches, and the others wait.

    Args:
        text: Path of a folder, or name of a repository.
        key: Key or argument that problems name; empty: none.

    Raises:
        ConfigError: There is no such repository, or it holds no safetensors.
        StorageError: The Hub cannot be reached, or the disk has no room.
    """
    name = model_named(text)
    if name is None:
        return Path(text)
    with _of_key(text, key):
        name = name.pinned()
        folder = name.folder
        weights = _weights_of(folder)
        if weights and all((folder / file).is_file() for file in (SHAPE, TOKENIZER, *weights)):
            return folder
        folder, sizes = _shape_folder(name), name.sizes()
        name.fetch({file: sizes[file] for file in (*COMPANIONS, INDEX) if file in sizes}, _print_line)
        weights = _weights_of(folder) or [WEIGHTS]
        absent = [file for file in weights if file not in sizes]
        if absent and not is_offline():
            raise _without_weights(name, absent[0], sizes)
        return name.fetch({file: sizes.get(file, 0) for file in weights}, _print_line)


def tokenizer_folder(text: str) -> Path:
    """Folder with the tokenizer of a model, which is a folder of this machine or a repository of the Hub.

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
    """Commit of the same repository in the run's record; None if there is none."""
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
    """Folder of a commit with its `config.json`."""
    if not (name.folder / SHAPE).is_file():
        sizes = name.sizes()
        if sizes and SHAPE not in sizes:
            hint = "take a repository in the format of transformers, with config.json and *.safetensors"
            raise ConfigError([Problem("", f"{name} has no {SHAPE}, but {listed(sizes) or 'no file'}", hint=hint)])
    return name.fetch({SHAPE: 0}, _print_line)


def _weights_of(folder: Path) -> list[str]:
    """Files of the weights in a folder of the cache: those of its index, or the only one; empty if unknown."""
    if not (folder / INDEX).is_file():
        return [WEIGHTS] if (folder / WEIGHTS).is_file() else []
    try:
        files = json.loads(read_bytes(folder / INDEX))["weight_map"].values()
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / INDEX} is no table of tensors and their files: {cause_of(error)}") from error
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
    """Report refusals of the Hub within this context as problems of a key."""
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
    """Begin of a message about a name that could also be a path."""
    if text.startswith(SCHEME):
        return ""
    return f"no folder {text} is here, and "


def _print_line(line: str) -> None:
    standard_error(quiet=not Placement.read().speaks_for_node).print(line, markup=False)
