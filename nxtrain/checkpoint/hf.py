"""Hugging Face model folders: what is in one, whether it fits a model, and reading from it without loading it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nxtrain.checkpoint.match import mismatches
from nxtrain.errors import ConfigError, Problem
from nxtrain.mesh import Axis
from nxtrain.sharding import ParamTable

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class HfFolder:
    """A folder with `config.json` and safetensors, in one file or several with an index.

    Attributes:
        path: The folder.
        config: Content of `config.json`.
        shapes: Shape of every tensor, by name.
        dtype: The narrowest type that holds all weights exactly.

    Raises:
        ConfigError: A file is missing or damaged, or weights are quantized.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _read_json(path / CONFIG)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        codes: dict[str, str] = {}
        for file in _weight_files(path):
            for name, shape, code in _header(file):
                self.shapes[name], self._files[name], codes[name] = shape, file, code
        foreign = [f"{name} is {code}" for name, code in codes.items() if code not in _DTYPES]
        if foreign:
            raise ConfigError(f"{path}: {foreign[0]}; weights of type {', '.join(_DTYPES)} can be read")
        self.dtype = reduce(torch.promote_types, {_DTYPES[code] for code in codes.values()})

    def check(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Hold the tensors of the folder against those of a model.

        Args:
            wanted: Whole shape of every tensor of the model, by name.

        Raises:
            ConfigError: Some are missing, unknown or of another shape; all are named.
        """
        found = {name: shape for name, shape in self.shapes.items() if name in wanted or not self._harmless(name)}
        problems = mismatches(wanted, found)
        if problems:
            raise ConfigError([Problem("", f"{self.path}: tensors do not fit the model: {p}") for p in problems])

    def read(self, name: str, dim: int = 0, start: int = 0, length: int | None = None) -> Tensor:
        """Read some entries of a tensor along one dimension, or all of it, and nothing else."""
        size = self.shapes[name][dim]
        entries = slice(start, size if length is None else start + length)
        where = (*(slice(None),) * dim, entries)
        with safe_open(self._files[name], framework="pt") as file:
            part: Tensor = file.get_slice(name)[where]
        return part

    def _harmless(self, name: str) -> bool:
        # Old exports carry the rotary table; some exports of tied models carry the embedding twice.
        tied_head = name == "lm_head.weight" and self.config.get("tie_word_embeddings", False)
        return tied_head or name.endswith("rotary_emb.inv_freq")


def hf_weights(
    src: Path, table: ParamTable, axis: Axis, wanted: Mapping[str, tuple[int, ...]]
) -> Callable[[str, Tensor], None]:
    """Check a Hugging Face folder, and return what writes a parameter's shard from it, given its name and host tensor.

    Only what this rank holds is read; weights are cast to the tensor's type, and padding is left as it is.

    Args:
        src: The folder.
        table: How the parameters of this rank's stage are cut.
        axis: Over what.
        wanted: Whole shape of every tensor of the whole model, by name, so that all stages refuse the same folders.

    Raises:
        ConfigError: The folder is unreadable or does not fit the model.
    """
    folder = HfFolder(src)
    folder.check(wanted)

    def fill(name: str, local: Tensor) -> None:
        spec = table[name]
        for piece, view in spec.views(local, axis):
            if piece.length:
                source = spec.global_name(name, piece.segment)
                view.copy_(folder.read(source, spec.dim or 0, piece.start, piece.length))

    return fill


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; is {file.parent} a Hugging Face model?") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{file} is no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return content


def _weight_files(path: Path) -> list[Path]:
    if not (path / INDEX).exists():
        files = [path / WEIGHTS]
    else:
        places = _read_json(path / INDEX).get("weight_map", {})
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise ConfigError(f"{path / INDEX}: weight_map must name a file for each tensor; fetch the folder anew")
        files = [path / name for name in sorted(set(places.values()))]
    missing = ", ".join(file.name for file in files if not file.is_file())
    if missing or not files:
        raise ConfigError(
            f"{path} lacks {missing or 'weights'}; pickled weights (*.bin) must be saved as safetensors first"
        )
    return files


def _header(file: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                part = opened.get_slice(name)
                yield name, tuple(part.get_shape()), part.get_dtype()
    except SafetensorError as error:
        raise ConfigError(f"{file} is damaged: {error}") from error
