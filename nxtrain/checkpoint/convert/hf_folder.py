"""Hugging Face model folders: names and shapes of tensors, checks against a model, and partial reads."""

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
from nxtrain.common.hf_files import CONFIG, INDEX, WEIGHTS
from nxtrain.common.io.atomic import write_durably
from nxtrain.common.io.regular import read_bytes, require_regular
from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import ParamTable
from nxtrain.common.text import listed
from nxtrain.config.check import quantization

_SEPARATORS = frozenset("/\\\0")
"""Characters that the file name of a weight file must not contain, such as path separators."""

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_COMPARED_ROWS = 1 << 12
_ROTARY_TABLE = "rotary_emb.inv_freq"
"""End of the names of rotary tables in old exports, which are float32 next to weights of any type."""

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class _Stored:
    """Location of a tensor in a safetensors file: a whole tensor, or one expert's matrix of a stacked tensor.

    A stacked tensor has the shape (experts, rows, columns).

    Args:
        file: Safetensors file.
        name: Name of the tensor in the file.
        expert: Index of the expert; None for the whole tensor.
        rows: Rows of the expert's matrix in the stacked tensor.
        step: Stride of the matrix's rows among the columns of a transposed, interleaved tensor; 0 if not transposed.
    """

    file: Path
    name: str
    expert: int | None = None
    rows: range = range(0)
    step: int = 0

    def read(self, where: list[slice]) -> Tensor:
        """Read the entries of a tensor at slices of its dimensions."""
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
    """Hugging Face model folder with `config.json` and safetensors files.

    `dtype` is the narrowest type that holds all weights exactly. transformers 5 may stack the matrices of all experts
    of a block in one tensor. Such matrices are read one by one, under the names of unstacked weights.
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
            raise ConfigError(f"{path}: {foreign[0]}, but only weights of type {', '.join(_DTYPES)} can be read")
        self._unstack()
        types = {_DTYPES[code] for name, code in codes.items() if not name.endswith(_ROTARY_TABLE)}
        self.dtype = reduce(torch.promote_types, types or {torch.float32})

    def check(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Check that names and shapes of the folder's tensors equal the tensors of a model.

        Raises:
            ConfigError: Tensors are missing, are unknown, or have other shapes; or a tied head differs from the
                embedding.
        """
        is_tied = self.config.get("tie_word_embeddings", False)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in self.shapes.items():
            # Old exports carry the rotary table; some exports of tied models carry the embedding twice.
            is_harmless = name.endswith(_ROTARY_TABLE) or (is_tied and name == HEAD)
            if name in wanted or not is_harmless:
                shapes[name] = shape
        problems = mismatches(wanted, shapes)
        if problems:
            raise ConfigError([Problem("", f"{self.path}: tensors do not fit the model: {p}") for p in problems])
        if HEAD in self.shapes and HEAD not in wanted and not self._has_equal_head():
            raise ConfigError(
                f"{self.path}: {CONFIG} has tie_word_embeddings=true, but {HEAD} differs from {EMBEDDING}, and a tied "
                f"model would lose it. Set tie_word_embeddings=false in {CONFIG} to train both, or remove {HEAD} from "
                "the weight files"
            )

    def _has_equal_head(self) -> bool:
        """True if the output projection equals the embedding, compared in ranges of rows."""
        if self.shapes[HEAD] != self.shapes.get(EMBEDDING):
            return False
        num_rows = self.shapes[HEAD][0]
        for start in range(0, num_rows, _COMPARED_ROWS):
            length = min(_COMPARED_ROWS, num_rows - start)
            head, embedding = (self.read(name, 0, start, length).float() for name in (HEAD, EMBEDDING))
            if not torch.equal(head, embedding):
                return False
        return True

    def read(self, name: str, dim: int = 0, start: int = 0, length: int | None = None) -> Tensor:
        """Read a range of a tensor along one dimension, or the whole tensor, without reading other entries."""
        stop = self.shapes[name][dim]
        if length is not None:
            stop = start + length
        whole: list[slice] = [slice(None)] * max(1, len(self.shapes[name]))
        whole[dim] = slice(start, stop)
        return self._stored[name].read(whole)

    @cached_property
    def mixture(self) -> MoeShape | None:
        """Shape of the model's mixture of experts; None for a model without experts."""
        family = find_family(str(self.config.get("model_type")))
        return family.dimensions(family.from_hf(self.config)).mixture

    def _unstack(self) -> None:
        """Split stacked expert tensors into one matrix per expert, and rename routers, as in unstacked folders."""
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
        """Split interleaved, transposed tensors of experts into weights per expert; see `stacked_experts`."""
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
        """Fingerprint of the weights: a hash of name, shape and middle row of every tensor.

        Reading all rows would take minutes.
        """
        parts = list[bytes]()
        for name, shape in sorted(self.shapes.items()):
            row = self.read(name, 0, shape[0] // 2, 1) if shape else self.read(name)
            parts += [f"{name} {shape} {row.dtype}".encode(), bytes(bytes_of(row))]
        return fingerprint(parts)


class NonFiniteCollector:
    """Collector of tensors with NaN or infinite values during an import.

    Args:
        source: Imported folder, for the error message.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._found: dict[str, tuple[int, int]] = {}  # numbers of NaN and of infinite values, by tensor

    def note(self, name: str, part: Tensor) -> None:
        """Count NaN and infinite values in a part of a tensor."""
        # The extremes of a part are finite exactly if all its values are, and cost no memory.
        if not part.numel() or torch.stack(torch.aminmax(part)).isfinite().all():
            return
        nans, infinite = self._found.get(name, (0, 0))
        self._found[name] = (nans + int(part.isnan().sum()), infinite + int(part.isinf().sum()))

    def check(self) -> None:
        """Raise an InputError if NaN or infinite values were recorded."""
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
            f"{self._source}: {tensors} values that are not finite: {listed(shown)}. Every loss would be NaN; "
            "download the folder again, compare its files with the source's checksums, or export the model again"
        )


class HfWeights:
    """Reader of this rank's parameter shards from a Hugging Face folder.

    Only the entries of this rank are read. Weights are cast to the parameter's type, and padding is unchanged. `wanted`
    has the shapes of the whole model, so that all pipeline stages refuse the same folders.
    """

    def __init__(
        self, src: Path | HfFolder, table: ParamTable, axis: Axis, wanted: Mapping[str, tuple[int, ...]]
    ) -> None:
        if isinstance(src, Path):
            src = HfFolder(src)
        self._folder = src
        self._table, self._axis = table, axis
        self._folder.check(wanted)
        self._finiteness = NonFiniteCollector(self._folder.path)

    def __call__(self, name: str, local: Tensor) -> None:
        """Fill the shard of a parameter, a host tensor, with weights of the folder."""
        spec = self._table[name]
        for piece, view in spec.views(local, self._axis):
            if piece.length:
                source = spec.global_name(name, piece.segment)
                view.copy_(self._folder.read(source, spec.dim or 0, piece.start, piece.length))
                self._finiteness.note(source, view)

    def whole(self, name: str) -> Tensor:
        """Read a whole tensor in the type that the folder stores."""
        tensor = self._folder.read(name)
        self._finiteness.note(name, tensor)
        return tensor

    def check(self) -> None:
        """Raise an InputError if any value that was read is NaN or infinite."""
        self._finiteness.check()


def read_object(file: Path, hint: str = "") -> dict[str, Any]:
    """Read a JSON object from a file; `hint` is the advice in the error if the file cannot be read."""
    try:
        content = json.loads(read_bytes(file))  # as bytes, since the text may begin with a byte order mark
    except OSError as error:
        way_out = hint or f"is {file.parent} a Hugging Face model?"
        raise ConfigError(f"cannot read {file}: {error.strerror}; {way_out}") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{file} is not valid JSON: {cause_of(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} does not contain a JSON object")
    return content


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file durably, with fsync."""
    write_durably(file, lambda f: f.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8"))


def _weight_files(path: Path) -> list[Path]:
    """List the weight files; transformers too reads a single file before an index, which may be an older one."""
    names = [WEIGHTS]
    if (path / INDEX).exists() and not (path / WEIGHTS).exists():
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
    """Read the names of weight files from an index, and check that each is a file name without a folder."""
    files = read_object(file).get("weight_map", {})
    if not isinstance(files, dict):
        raise ConfigError(f'{file}: "weight_map" must be an object that maps tensor names to file names')
    for tensor, name in files.items():
        if not isinstance(name, str):
            raise ConfigError(f'{file}: "weight_map" maps {tensor} to {name!r}, which is not a file name')
        if name in {"", ".", ".."} or not _SEPARATORS.isdisjoint(name):
            raise ConfigError(
                f"{file} maps {tensor} to {name!r}, but weight files must be in the folder of the index, and names "
                "must not contain a path separator. Download the folder from a trusted source, or move its files "
                "together and correct the index"
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
