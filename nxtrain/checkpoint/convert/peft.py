"""LoRA adapters: PEFT folders, adapter checkpoints, and base weights merged with an adapter.

A PEFT folder has `adapter_config.json` and `adapter_model.safetensors`. Its tensors have nxtrain's names with a prefix
and a suffix. The update of a weight is the product of two matrices, which is added when the weight is read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from nxtrain.backends.nf4 import whole_packing
from nxtrain.checkpoint.convert import peft_experts
from nxtrain.checkpoint.convert.hf_folder import HfFolder, NonFiniteCollector, read_object, write_json
from nxtrain.checkpoint.load import open_checkpoint, read_shards, whole_weights
from nxtrain.checkpoint.meta import Meta
from nxtrain.checkpoint.shards import mismatches
from nxtrain.common import hf_files
from nxtrain.common.errors import CheckpointError, ConfigError, Problem, cause_of
from nxtrain.common.io.atomic import replace_bytes, replace_text
from nxtrain.common.io.hub import model_named
from nxtrain.common.io.object_store import Location
from nxtrain.common.io.regular import require_regular
from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import ParamTable
from nxtrain.config.finetune_schema import FinetuneConfig
from nxtrain.config.model_folder import whole_folder
from nxtrain.config.tables import toml_value
from nxtrain.nn.lora import EXPERT_TARGETS, A, B, scale_of

FILES = CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Names of the files in a PEFT folder."""
DRAFTS = ".adapter_*.draft"
"""Name pattern of the files that a killed write of an adapter leaves in its folder."""
_BLOCKS = ".layers."
"""Part of the names of a block's weights; QLoRA quantizes matrices of blocks, but not embedding and head."""
_PREFIX, _SUFFIX = "base_model.model.", ".weight"
_FINGERPRINT = "base_fingerprint"
"""Key of the base weights' fingerprint in the metadata of the adapter's weight file; PEFT ignores the key."""

_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, {}),
    "layer_replication": (None, []),
    "corda_config": (None,),
    "eva_config": (None,),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "mica"),
}
"""Supported values of keys in `adapter_config.json`; other values would change the adapter's computation.

With other initial values, such as PiSSA, PEFT takes them from the base weights, which the adapter then changes, too.
"""

_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "megatron_config",
        "megatron_core",
        "peft_version",
        "revision",
        "runtime_config",
        "target_modules",
        "target_parameters",
        "task_type",
        "use_rslora",
    }
)
"""Keys in `adapter_config.json` that are read, or that do not change the computation of an adapter."""


@dataclass(frozen=True)
class Adapter:
    """LoRA adapter: low-rank updates of some weights of a model.

    Args:
        config: Rank, scale and targets of the adapter.
        tensors: Unsharded matrices A and B of each layer, by parameter name such as
            `model.layers.0.mlp.up_proj.lora_A`. Experts of all families are in a module `mlp`, and have the names of
            `peft_experts`.
        base: Folder of the base weights; empty if unknown.
        base_fingerprint: Fingerprint of the base weights; empty if unknown, as in folders that PEFT wrote.
    """

    config: FinetuneConfig
    tensors: Mapping[str, Tensor]
    base: str = ""
    base_fingerprint: str = ""

    @property
    def layers(self) -> set[str]:
        """Names of the layers that have an adapter."""
        return {name.removesuffix(f".{B}") for name in self.tensors if name.endswith(f".{B}")}

    def pair(self, layer: str) -> tuple[Tensor, Tensor]:
        """Return the LoRA matrices A and B of a layer; PEFT with transformers 4 has both of each expert's matrix."""
        own = f"{layer}.{A}"
        if own in self.tensors:
            return self.tensors[own], self.tensors[f"{layer}.{B}"]
        return self.tensors[f"{peft_experts.layer_of_a(layer)}.{A}"], self.tensors[f"{layer}.{B}"]

    def update(self, layer: str, dim: int, start: int, length: int) -> Tensor:
        """Compute a range of the update of a layer's weight along one dimension, in float32."""
        a, b = (matrix.float() for matrix in self.pair(layer))
        if dim:
            a = a.narrow(1, start, length)
        else:
            b = b.narrow(0, start, length)
        return (b @ a) * scale_of(self.config)

    def require_base(self, base: HfFolder, origin: str) -> None:
        """Check that a folder holds the base weights of the adapter, if their fingerprint is known.

        Raises:
            ConfigError: The folder holds other weights.
        """
        if not self.base_fingerprint:
            return
        actual = base.fingerprint()
        if actual != self.base_fingerprint:
            raise ConfigError(
                f"{origin} was trained on other base weights than {base.path}: fingerprint "
                f"{self.base_fingerprint!r} there and {actual!r} here; give the base of the adapter, {self.base}"
            )


class MergedFolder(HfFolder):
    """Hugging Face folder whose weights are read in `dtype`, with an adapter merged into them."""

    def __init__(self, path: Path, adapter: Adapter, dtype: torch.dtype | None = None) -> None:
        super().__init__(path)
        self._adapter, mixture = adapter, self.mixture
        self._updated = {peft_experts.weights_of(layer, mixture): layer for layer in sorted(adapter.layers)}
        self._whole = set[str]()
        if mixture is not None:
            router = f".{mixture.module}.{mixture.router}.weight"
            for name in self.shapes:
                # QLoRA does not quantize the matrices of experts and routers.
                is_expert = ".experts." in name or name.endswith(router)
                if is_expert and f".{mixture.module}." in name:
                    self._whole.add(name)
        self._restored = "", torch.empty(0)
        self.dtype = dtype or self.dtype
        for weight, layer in self._updated.items():
            a, b = adapter.pair(layer)
            rows, columns = b.shape[0], a.shape[1]
            if self.shapes.get(weight) != (rows, columns):
                shape = self.shapes.get(weight, "absent")
                raise ConfigError(
                    f"{path}: {weight} is {shape}, but the adapter needs {(rows, columns)}; give the adapter's base"
                )

    def read(self, name: str, dim: int = 0, start: int = 0, length: int | None = None) -> Tensor:
        part = self._base(name, dim, start, length)
        if name not in self._updated:
            return part
        wide = part.to(self.dtype).float() + self._adapter.update(self._updated[name], dim, start, part.shape[dim])
        return wide.to(self.dtype)

    def _base(self, name: str, dim: int, start: int, length: int | None) -> Tensor:
        """Read entries of the base weights; for QLoRA, quantize and dequantize them as in training."""
        is_matrix = len(self.shapes[name]) > 1 and _BLOCKS in name and name not in self._whole
        if self._adapter.config.method != "qlora" or not is_matrix:
            return super().read(name, dim, start, length)
        if self._restored[0] != name:  # the parts of a tensor are read in sequence
            packing = whole_packing(self.shapes[name], self.dtype)
            self._restored = name, packing.restore(packing.pack([super().read(name)]))
        whole = self._restored[1]
        if length is None:
            length = whole.shape[dim] - start
        return whole.narrow(dim, start, length)


class AdapterWeights:
    """Reader of this rank's adapter shards from a PEFT folder that fits the run's configuration."""

    def __init__(
        self,
        src: Path,
        config: FinetuneConfig,
        table: ParamTable,
        axis: Axis,
        wanted: Mapping[str, tuple[int, ...]],
        base: Path,
    ) -> None:
        adapter = read_adapter(src)
        self._tensors = adapter.tensors
        self._table, self._axis = table, axis
        for key in ("r", "alpha", "rslora"):
            there, here = getattr(adapter.config, key), getattr(config, key)
            if there != here:
                reason = (
                    f"the adapter in finetune.adapter={src} has {toml_value(there)}, but the run has {toml_value(here)}"
                )
                raise ConfigError([Problem(f"finetune.{key}", reason, hint=f"use finetune.{key}={toml_value(there)}")])
        shapes = {name: tuple(tensor.shape) for name, tensor in adapter.tensors.items()}
        problems = mismatches({peft_experts.in_mlp(name): shape for name, shape in wanted.items()}, shapes)
        if problems:
            hint = f"the layers of the adapter are finetune.targets={toml_value(adapter.config.targets)}"
            raise ConfigError(
                [Problem("finetune.adapter", f"{src} does not fit the model: {p}", hint=hint) for p in problems]
            )
        adapter.require_base(HfFolder(base), f"the adapter in finetune.adapter={src}")
        finiteness = NonFiniteCollector(src)
        for name, tensor in adapter.tensors.items():
            finiteness.note(name, tensor)
        finiteness.check()

    def __call__(self, name: str, local: Tensor) -> None:
        """Fill the shard of an adapter's parameter, a host tensor."""
        spec = self._table[name]
        for piece, view in spec.views(local, self._axis):
            whole = self._tensors[peft_experts.in_mlp(spec.global_name(name, piece.segment))]
            view.copy_(whole.narrow(spec.dim or 0, piece.start, piece.length))


def read_adapter(folder: Path) -> Adapter:
    """Read a LoRA adapter from a PEFT folder.

    Raises:
        ConfigError: The folder is damaged, or its adapter is not supported.
    """
    config = _read_config(folder / CONFIG)
    tensors: dict[str, Tensor] = {}
    try:
        require_regular(folder / WEIGHTS)
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            about = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118 - no mapping
                tensors[name.removeprefix(_PREFIX).removesuffix(_SUFFIX)] = file.get_tensor(name)
    except OSError as error:
        reason = cause_of(error)
        raise ConfigError(f"cannot read {folder / WEIGHTS}: {reason}; give a folder that PEFT wrote") from error
    except SafetensorError as error:
        raise ConfigError(f"cannot read {folder / WEIGHTS}: {error}; give a folder that PEFT wrote") from error
    layers = {name.rpartition(".")[0] for name in tensors}
    parameters = config.get("target_parameters") or []
    unknown = sorted(name for name in tensors if name.rpartition(".")[2] not in {A, B})
    unpaired = [layer for layer in sorted(layers) if not {f"{layer}.{A}", f"{layer}.{B}"} <= tensors.keys()]
    if unknown or unpaired:
        raise ConfigError(
            f"{folder / WEIGHTS} has {(unknown + unpaired)[0]}, but each layer needs a pair of {A} and {B}"
        )
    rank = config["r"]
    for name, tensor in tensors.items():
        if ".experts" in name:
            num_experts, rest = divmod(tensor.shape[int(name.endswith(B))], rank)
            if rest == 0 and num_experts:
                continue
        dim = int(name.endswith(B))
        if tensor.shape[dim] != rank:
            raise ConfigError(f"{folder / WEIGHTS}: {name} has rank {tensor.shape[dim]}, but {CONFIG} has r={rank}")
    tensors = peft_experts.of_each(tensors, rank, parameters)
    targets = tuple(sorted(peft_experts.targets_of({name.removesuffix(f".{B}") for name in tensors if B in name})))
    try:
        shape = FinetuneConfig(
            method="lora",
            r=rank,
            alpha=float(config["lora_alpha"]),
            rslora=bool(config.get("use_rslora", False)),
            targets=targets,
        )
    except ValidationError as error:
        reasons = "; ".join(line["msg"].removeprefix("Value error, ") for line in error.errors())
        raise ConfigError(f"{folder / CONFIG} has no valid rank and scale: {reasons}") from error
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder / CONFIG} has no valid rank and scale: {error}") from error
    base = str(config.get("base_model_name_or_path") or "")
    if config.get("revision"):
        base += f"@{config['revision']}"
    return Adapter(shape, tensors, base, about.get(_FINGERPRINT, ""))


def write_adapter(folder: Path, adapter: Adapter) -> None:
    """Write a LoRA adapter as a PEFT folder; complete files replace those of an earlier adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    config, name = adapter.config, model_named(adapter.base)
    targets = peft_experts.targets_of(adapter.layers)
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base if name is None else name.repository,
        "r": config.r,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "target_modules": sorted(targets.difference(EXPERT_TARGETS)),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    if targets.intersection(EXPERT_TARGETS):
        content["target_parameters"] = sorted(targets.intersection(EXPERT_TARGETS))
    if name is not None:
        content["revision"] = name.revision
    stacked = peft_experts.stacked(adapter.tensors)
    tensors = {f"{_PREFIX}{name}{_SUFFIX}": tensor.contiguous() for name, tensor in sorted(stacked.items())}
    about = {"format": "pt"}
    if adapter.base_fingerprint:
        about[_FINGERPRINT] = adapter.base_fingerprint
    replace_bytes(folder / WEIGHTS, save(tensors, metadata=about), durable=True)
    replace_text(folder / CONFIG, json.dumps(content, indent=2) + "\n", durable=True)


def adapter_of(meta: Meta, tensors: Mapping[str, Tensor]) -> Adapter:
    """Make the adapter of a run from its metadata and its unsharded matrices."""
    config = FinetuneConfig.model_validate({"method": "lora", **meta.adapter})
    named = {peft_experts.in_mlp(name): tensor for name, tensor in tensors.items()}
    return Adapter(config, named, meta.base, meta.base_fingerprint)


def read_checkpoint(checkpoint: Location) -> tuple[Meta, Adapter]:
    """Read the metadata and the LoRA adapter of a checkpoint.

    Raises:
        CheckpointError: The checkpoint holds a whole model.
    """
    meta, manifest = open_checkpoint(checkpoint)
    if not meta.adapter:
        raise CheckpointError(f"{checkpoint} holds a whole model and no adapter; use nxtrain convert nxtrain-to-hf")
    targets = {shard: torch.empty(shard.shape, dtype=shard.dtype) for shard in whole_weights(manifest)}
    read_shards(checkpoint, manifest, targets)
    return meta, adapter_of(meta, {shard.name: tensor for shard, tensor in targets.items()})


def merged_checkpoint(checkpoint: Location, base: Path | None = None) -> tuple[Meta, MergedFolder]:
    """Open the base weights of an adapter's checkpoint, merged with the adapter.

    Raises:
        ConfigError: There is no base folder.
        CheckpointError: The base folder holds other weights than the run's.
    """
    meta, adapter = read_checkpoint(checkpoint)
    path = base or _base_folder(meta.base)
    if not path.is_dir():
        hint = "give the folder of the base: nxtrain convert nxtrain-to-hf SRC DST --base DIR"
        raise ConfigError(f"{checkpoint} holds an adapter of the weights in {path}, which is not a folder here; {hint}")
    fingerprint = HfFolder(path).fingerprint()
    if fingerprint != meta.base_fingerprint:
        raise CheckpointError(
            f"{checkpoint} holds an adapter of other base weights than {path}: fingerprint "
            f"{meta.base_fingerprint!r} there and {fingerprint!r} here; give the base folder of the run"
        )
    return meta, MergedFolder(path, adapter, getattr(torch, meta.dtype))


def merged_adapter(folder: Path, base: Path | None = None) -> MergedFolder:
    """Open the base weights of a PEFT folder, merged with its adapter.

    Raises:
        ConfigError: There is no base folder, or it holds other weights.
    """
    adapter = read_adapter(folder)
    path = base or _base_folder(adapter.base)
    if not (base or adapter.base) or not path.is_dir():
        named = adapter.base or "nothing"
        given = ", which is not a folder of this machine; give --base DIR, or --base ORGANIZATION/NAME of the Hub"
        if base:
            given = f", and --base {base} is not a folder"
        raise ConfigError(f"{folder} is an adapter of {named}{given}; the base is a Hugging Face folder")
    adapter.require_base(HfFolder(path), f"the adapter in {folder}")
    return MergedFolder(path, adapter)


def _base_folder(base: str) -> Path:
    """Folder of an adapter's base weights; a model of the Hub at a commit is downloaded to the cache."""
    name = model_named(base)
    if name is None or not name.is_pinned:
        return Path(base)
    return whole_folder(base, "")


def copy_companions(folder: Path, out: Path, dtype: str) -> None:
    """Copy a Hugging Face folder's files other than weights, and set the type in `config.json`."""
    config = {**HfFolder(folder).config, "dtype": dtype, "torch_dtype": dtype}
    write_json(out / hf_files.CONFIG, config)
    for name in hf_files.COMPANIONS:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def _read_config(file: Path) -> dict[str, Any]:
    config = read_object(file, "give a folder that PEFT wrote")
    for key, understood in _UNSUPPORTED.items():
        if config.get(key, understood[0]) not in understood:
            hint = ""
            if key == "init_lora_weights":
                hint = (
                    ", since the base weights were changed, too. Convert the adapter with PEFT: "
                    "model.save_pretrained(DIR, path_initial_model_for_weight_conversion=INITIAL_ADAPTER)"
                )
            raise ConfigError(f"{file}: {key}={config[key]!r} is not supported; only {understood[0]!r} is{hint}")
    for key, value in config.items():
        is_option = value is True or (isinstance(value, str | list | dict) and value)  # a number only tunes an option
        if is_option and key not in _HARMLESS and key not in _UNSUPPORTED:
            raise ConfigError(
                f"{file}: {key}={value!r:.200} is not supported, and may change the output of the adapter; merge the "
                "adapter with PEFT (merge_and_unload), or train one without this option"
            )
    for parameter in config.get("target_parameters") or []:
        if not f".{parameter}".endswith(tuple(f".{target}" for target in EXPERT_TARGETS)):
            names = " and ".join(EXPERT_TARGETS)
            raise ConfigError(f"{file}: target_parameters has {parameter!r}, which is not supported; only {names} are")
    if not isinstance(config.get("r"), int):
        raise ConfigError(f"{file} has no integer r, the rank of the adapter")
    return config
