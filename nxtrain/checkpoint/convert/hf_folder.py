"""Hugging Face model folders: their tensors, the comparison with a model, and reads of parts of tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nxtrain.checkpoint.convert.stacked_experts import STACKED, parts_of
from nxtrain.checkpoint.meta import fingerprint
from nxtrain.checkpoint.shard_files import bytes_of
from nxtrain.checkpoint.shards import mismatches
from nxtrain.common.dimensions import MoeShape
from nxtrain.common.errors import ConfigError, InputError, Problem, cause_of
from nxtrain.common.family import find_family
from nxtrain.common.io.atomic import write_durably
from nxtrain.common.io.regular import read_bytes, require_regular
from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import ParamTable
from nxtrain.common.text import listed
from nxtrain.config.check import quantization
from nxtrain.config.model_folder import INDEX, SHAPE, WEIGHTS

CONFIG = SHAPE

_SEPARATORS = frozenset("/\\\0")
"""Characters that no file name contains on a system that writes such folders."""

"""Most tensors that a message names."""

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class _Stored:
    """Tensor of a file, or the matrix of one expert in a tensor of the file: (experts, rows, columns).

    Args:
        name: Name in the file.
        expert: Index of the expert; None: the whole tensor.
        rows: Rows of the expert's matrix.
        step: The tensor has the transposed matrix, and of so many columns one is of the matrix; 0: `rows` of it.
    """

    file: Path
    name: str
    expert: int | None = None
    rows: range = range(0)
    step: int = 0

    def read(self, where: list[slice]) -> Tensor:
        """Read a box of entries."""
        require_regular(self.file)
        with safe_open(self.file, framework="pt") as file:
            tensor = file.get_slice(self.name)
            if self.expert is None:
                part: Tensor = tensor[tuple(where)]
                return part
            rows = self.rows[where[0]]
            if self.step:
                transposed = (slice(self.expert, self.expert + 1), *where[1:], slice(rows.start, rows.stop))
                several: Tensor = tensor[transposed]
                return several.squeeze(0)[..., :: self.step].t().contiguous()
            box = (slice(self.expert, self.expert + 1), slice(rows.start, rows.stop), *where[1:])
            matrix: Tensor = tensor[box]
            return matrix.squeeze(0)


class HfFolder:
    """A folder with `config.json` and safetensors; `dtype` is the narrowest type that holds all weights exactly.

    transformers 5 may stack the matrices of all experts of a block. They are read one by one, under their usual names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = read_object(path / CONFIG)
        quantized = quantization(self.config)
        if quantized:
            raise ConfigError(f"{path}: {quantized}")
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._stored: dict[str, _Stored] = {}
        codes: dict[str, str] = {}
        for file in _weight_files(path):
            for name, shape, code in _header(file):
                self.shapes[name] = shape
                self._stored[name] = _Stored(file, name)
                codes[name] = code
        foreign = [f"{name} is {code}" for name, code in codes.items() if code not in _DTYPES]
        if foreign:
            raise ConfigError(f"{path}: {foreign[0]}; weights of type {', '.join(_DTYPES)} can be read")
        self._unstack()
        self.dtype = reduce(torch.promote_types, {_DTYPES[code] for code in codes.values()})

    def check(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Compare the tensors of the folder with the tensors of a model."""
        is_tied = self.config.get("tie_word_embeddings", False)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in self.shapes.items():
            # Old exports carry the rotary table; some exports of tied models carry the embedding twice.
            is_harmless = name.endswith("rotary_emb.inv_freq") or (is_tied and name == "lm_head.weight")
            if name in wanted or not is_harmless:
                shapes[name] = shape
        problems = mismatches(wanted, shapes)
        if problems:
            raise ConfigError([Problem("", f"{self.path}: tensors do not fit the model: {p}") for p in problems])

    def read(self, name: str, dim: int = 0, start: int = 0, length: int | None = None) -> Tensor:
        """Read some entries of a tensor along one dimension, or the whole tensor; other entries are not read."""
        stop = self.shapes[name][dim]
        if length is not None:
            stop = start + length
        whole: list[slice] = [slice(None)] * max(1, len(self.shapes[name]))
        whole[dim] = slice(start, stop)
        return self._stored[name].read(whole)

    @cached_property
    def mixture(self) -> MoeShape | None:
        """Experts of the model's blocks; None: the model has none."""
        family = find_family(str(self.config.get("model_type")))
        return family.dimensions(family.from_hf(self.config)).mixture

    def _unstack(self) -> None:
        """Give the matrices of experts in stacked tensors, and their routers, the names of other files."""
        stacked = {name for name in self.shapes if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))}
        if not stacked or any(len(self.shapes[name]) != 3 for name in stacked):  # noqa: PLR2004 - expert, row, column
            return
        mixture = self.mixture
        if mixture is None:
            return
        if mixture.biases:
            self._unstack_in_turn(mixture)
            return
        for name in stacked:
            num_experts, num_rows, num_columns = self.shapes.pop(name)
            stored = self._stored.pop(name)
            block = name.partition(".mlp.")[0]
            matrices: tuple[str, ...] = (mixture.gate, mixture.up)
            if name.endswith(".down_proj"):
                matrices = (mixture.down,)
            height = num_rows // len(matrices)
            for expert, (index, matrix) in product(range(num_experts), enumerate(matrices)):
                own = f"{block}.{mixture.module}.experts.{expert}.{matrix}.weight"
                self.shapes[own] = (height, num_columns)
                rows = range(index * height, (index + 1) * height)
                self._stored[own] = replace(stored, expert=expert, rows=rows)
        for name in [name for name in self.shapes if name.endswith(".mlp.gate.weight")]:
            own = name.replace(".mlp.", f".{mixture.module}.")
            self.shapes[own], self._stored[own] = self.shapes.pop(name), self._stored.pop(name)

    def _unstack_in_turn(self, mixture: MoeShape) -> None:
        """Give the matrices and biases of experts their own names; see `stacked_experts`."""
        for name in [name for name in self.shapes if name.partition(".experts.")[2] in STACKED]:
            stored, (num_experts, *_, width) = self._stored.pop(name), self.shapes[name]
            others = self.shapes.pop(name)[1:-1]
            module, _, leaf = name.rpartition(".")
            parts, kind = parts_of(mixture, leaf)
            step, number = len(parts), width // len(parts)
            for expert, (index, part) in product(range(num_experts), enumerate(parts)):
                own = f"{module}.{expert}.{part}.{kind}"
                self.shapes[own] = (number, *others)
                rows = range(index, index + number * step, step)
                self._stored[own] = replace(stored, expert=expert, rows=rows, step=step)

    def fingerprint(self) -> str:
        """Identity of the weights: name, shape and middle row of every tensor. Reading all rows would take minutes."""
        parts = list[bytes]()
        for name, shape in sorted(self.shapes.items()):
            row = self.read(name, 0, shape[0] // 2, 1) if shape else self.read(name)
            parts += [f"{name} {shape} {row.dtype}".encode(), bytes(bytes_of(row))]
        return fingerprint(parts)


class Finiteness:
    """Collector of the tensors with values that are not finite during an import."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._found: dict[str, tuple[int, int]] = {}  # NaN and infinite values, by tensor

    def note(self, name: str, part: Tensor) -> None:
        """Check some values of a tensor, and record values that are not finite."""
        # The extremes of a part are finite exactly if all its values are, and cost no memory.
        if not part.numel() or torch.stack(torch.aminmax(part)).isfinite().all():
            return
        nans, infinite = self._found.get(name, (0, 0))
        self._found[name] = (nans + int(part.isnan().sum()), infinite + int(part.isinf().sum()))

    def check(self) -> None:
        """Refuse the import if any recorded value is not finite."""
        if not self._found:
            return
        shown = []
        for name, counts in self._found.items():
            kinds = [f"{count:,} {kind}" for count, kind in zip(counts, ("NaN", "infinite"), strict=True) if count]
            shown.append(f"{name} ({' and '.join(kinds)})")
        tensors = "1 tensor has"
        if len(self._found) > 1:
            tensors = f"{len(self._found):,} tensors have"
        raise InputError(
            f"{self._source}: {tensors} values that are not finite: {listed(shown)}. With them every loss is "
            "NaN; fetch the folder again, compare its files with the source's checksums, or export the model anew"
        )


class HfWeights:
    """Reader of this rank's parameters from a Hugging Face folder whose tensors fit the model.

    Only the entries of this rank are read. Weights are cast to the tensor's type; padding is unchanged. `wanted` has
    the shapes of the whole model, so that all stages refuse the same folders.
    """

    def __init__(
        self, src: Path | HfFolder, table: ParamTable, axis: Axis, wanted: Mapping[str, tuple[int, ...]]
    ) -> None:
        if isinstance(src, Path):
            src = HfFolder(src)
        self._folder = src
        self._table, self._axis = table, axis
        self._folder.check(wanted)
        self._finiteness = Finiteness(self._folder.path)

    def __call__(self, name: str, local: Tensor) -> None:
        """Fill a parameter's shard, a host tensor."""
        spec = self._table[name]
        for piece, view in spec.views(local, self._axis):
            if piece.length:
                source = spec.global_name(name, piece.segment)
                view.copy_(self._folder.read(source, spec.dim or 0, piece.start, piece.length))
                self._finiteness.note(source, view)

    def whole(self, name: str) -> Tensor:
        """Read a whole tensor, in the type of the folder."""
        tensor = self._folder.read(name)
        self._finiteness.note(name, tensor)
        return tensor

    def check(self) -> None:
        """Refuse the folder if any value that was read is not finite."""
        self._finiteness.check()


def read_object(file: Path, hint: str = "") -> dict[str, Any]:
    """JSON object of a file; `hint` is the way out where the file cannot be read."""
    try:
        content = json.loads(read_bytes(file))  # of bytes, since a text may begin with a byte order mark
    except OSError as error:
        way_out = hint or f"is {file.parent} a Hugging Face model?"
        raise ConfigError(f"cannot read {file}: {error.strerror}; {way_out}") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{file} is no valid JSON: {cause_of(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no JSON object")
    return content


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, and sync it to the disk."""
    write_durably(file, lambda f: f.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8"))


def _weight_files(path: Path) -> list[Path]:
    names = [WEIGHTS]
    if (path / INDEX).exists():
        names = _indexed(path / INDEX)
    files = [path / name for name in names]
    for file in files:
        if file.exists() and not file.is_file():
            raise ConfigError(f"{file} is not a regular file; is {path} a Hugging Face model?")
    missing = ", ".join(file.name for file in files if not file.is_file())
    if missing or not files:
        raise ConfigError(
            f"{path} lacks {missing or 'weights'}; pickled weights (*.bin) must be saved as safetensors first"
        )
    return files


def _indexed(file: Path) -> list[str]:
    """Names of the weight files of an index; each must be a file of the same folder."""
    files = read_object(file).get("weight_map", {})
    if not isinstance(files, dict):
        raise ConfigError(f'{file}: "weight_map" is no table of tensors and their files')
    for tensor, name in files.items():
        if not isinstance(name, str):
            raise ConfigError(f'{file}: "weight_map" gives {tensor} the file {name!r}, which is no name')
        if name in {"", ".", ".."} or not _SEPARATORS.isdisjoint(name):
            raise ConfigError(
                f"{file} places {tensor} in {name!r}; weight files lie beside their index, and a name has no "
                "separator. Fetch the folder from a source that you trust, or bring its files together "
                "and correct the index"
            )
    return sorted(set(files.values()))


def _header(file: Path) -> Iterator[tuple[str, tuple[int, ...], str]]:
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                part = opened.get_slice(name)
                yield name, tuple(part.get_shape()), part.get_dtype()
    except SafetensorError as error:
        raise ConfigError(f"{file} is damaged: {error}") from error
