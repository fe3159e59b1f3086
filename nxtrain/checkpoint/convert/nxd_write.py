"""Conversion of a checkpoint to NeuronX Distributed's rank files, one file in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxtrain.checkpoint.convert.hf import new_folder, refuse_to_overwrite, whole_shapes
from nxtrain.checkpoint.convert.hf_folder import write_json
from nxtrain.checkpoint.convert.nxd_files import (
    BASE_STATE,
    BEGUN,
    DONE,
    MASTER,
    MASTERS,
    MEANS,
    MODEL_DIR,
    OPTIM_DIR,
    SCHEDULER,
    USER_CONTENT,
    rank_file,
)
from nxtrain.checkpoint.convert.nxd_layout import EMBEDDING, HEAD, NxdLayout, Param, Platform, Qkv, default_copies
from nxtrain.checkpoint.convert.nxd_read import FAMILY, KEPT, OURS
from nxtrain.checkpoint.load import open_checkpoint, read_shards
from nxtrain.checkpoint.manifest import CheckpointManifest
from nxtrain.checkpoint.meta import Meta, read_meta
from nxtrain.checkpoint.mirror import locate_checkpoint
from nxtrain.checkpoint.shards import MODEL, TensorShard
from nxtrain.common.errors import CheckpointError, ConfigError, Problem
from nxtrain.common.hf_files import CONFIG
from nxtrain.common.io.atomic import write_durably
from nxtrain.common.io.object_store import Location
from nxtrain.common.run_folder import CONFIG_FILE
from nxtrain.config import check
from nxtrain.config.load import load
from nxtrain.config.schema import OptimConfig
from nxtrain.optim.schedule import Schedule, numbers_of_update

_FILES = (BEGUN, DONE, MODEL_DIR, OPTIM_DIR, SCHEDULER, USER_CONTENT, CONFIG)


@dataclass(frozen=True)
class NxdTarget:
    """Parallel degrees and tensor storage of the NxD run that will load the files.

    Args:
        tp, pp, dp: Parallel degrees; 0 for the degrees of the run that wrote the checkpoint.
        copies: Replicas of each key/value head; 0 for the smallest number that tp allows.
        qkv: Storage of q, k and v; None for separate, or grouped if heads are replicated.
        platform: Platform whose order of replicated heads is used.
        zero1: Shard the optimizer state over dp.
    """

    tp: int = 0
    pp: int = 0
    dp: int = 0
    copies: int = 0
    qkv: Qkv | None = None
    platform: Platform = "trn1"
    zero1: bool = True


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimizer configuration and learning rate, which NxD saves next to the optimizer state."""

    optim: OptimConfig
    lr: float


def optimizer_settings_of(checkpoint: Path | str, file: Path | None) -> OptimizerSettings:
    """Derive the optimizer settings of the next update from the run's configuration, which a checkpoint lacks.

    Args:
        checkpoint: Path or address of the checkpoint.
        file: Configuration of the run; None for the file in the run's folder, which must be on a disk.
    """
    path = locate_checkpoint(checkpoint)
    if file is None and isinstance(path, Path):
        file = path.parent.parent / CONFIG_FILE
    if file is None or not file.is_file():
        raise ConfigError(
            f"{path} contains no optimizer settings, and there is no {file or f'{CONFIG_FILE} with it'}; give the "
            "configuration of its run by --run CONFIG, or convert only the weights by --weights-only"
        )
    plan = check.resolve_config(load(file), world=None)
    meta = read_meta(path)
    rate = Schedule.of(plan.config, meta.rewarm_after).at(meta.step + 1)
    return OptimizerSettings(numbers_of_update(plan.config.optim, meta.step + 1, rate), rate)


def nxtrain_to_nxd(src: Path | str, dst: Path, target: NxdTarget, *, rates: OptimizerSettings | None) -> Path:
    """Convert a checkpoint to a tag folder that NeuronX Distributed's `load_checkpoint` reads; return the tag folder.

    Args:
        src: Path or address of the checkpoint.
        dst: Folder of tags. The tag is `step_<step>`; a tag of an earlier conversion is replaced.
        target: Parallel degrees and storage of the NxD run.
        rates: Optimizer settings, written with the optimizer state; None to write the weights only.
    """
    src = locate_checkpoint(src)
    meta, manifest = open_checkpoint(src)
    family, config = meta.model()
    if meta.adapter:
        raise ConfigError(
            f"{src} holds an adapter; merge it into its base first: nxtrain convert nxtrain-to-hf SRC DST"
        )
    if family.name != FAMILY:
        raise ConfigError(
            f"{src} is a {family.name} model, but NeuronX Distributed's format is written for {FAMILY} only"
        )
    values = config.model_dump(mode="json")
    tp = target.tp or meta.mesh.get("tp", 1)
    copies = target.copies or default_copies(values, tp)
    qkv = target.qkv
    if qkv is None:
        qkv = "separate"
        if copies > 1:
            qkv = "grouped"
    pp = target.pp or meta.mesh.get("pp", 1)
    dp = 1
    if target.zero1:
        dp = target.dp or meta.mesh.get("dp", 1)
    layout = NxdLayout(whole_shapes(family, config), values, tp, pp, copies, qkv, target.platform)
    writer = _Writer(src, meta, manifest, layout, dp, target.zero1)
    if rates is not None:
        writer.check_states()
    tag = dst / f"step_{meta.step}"
    refuse_to_overwrite(tag, _FILES)
    with new_folder(tag) as out:
        write_durably(out / BEGUN, lambda file: file.write_text("1"))
        example = {"qkv_linear": qkv != "separate", "fuse_qkv": qkv == "fused", "kv_shared_group_size": copies}
        write_json(out / CONFIG, {**family.to_hf(config, meta.dtype), **example})
        writer.write_weights(out / MODEL_DIR)
        if rates is not None:
            writer.write_states(out / OPTIM_DIR, rates)
            # State of the LambdaLR that NxD's scripts use, whose functions are not saved.
            scheduler = {
                "base_lrs": [rates.optim.lr] * 2,
                "last_epoch": meta.step,
                "_step_count": meta.step + 1,
                "_last_lr": [rates.lr] * 2,
                "lr_lambdas": [None] * 2,
            }
            _save(scheduler, out / SCHEDULER)
        # The position at which NxD's scripts resume, at the beginning of the data, and nxtrain's metadata.
        ours = meta.model_dump(mode="json", include={"kinds", *KEPT})
        position = {"total_steps": meta.step, "global_step": meta.step, "epoch": 0, "batch_idx": 0}
        _save({**position, "cli_args": {}, OURS: ours}, out / USER_CONTENT)
        write_durably(out / DONE, lambda file: file.write_text("1"))
    return tag


@dataclass(frozen=True)
class _Writer:
    """Writer of the files of all NxD ranks, with the optimizer state sharded over `dp` ranks."""

    src: Location
    meta: Meta
    manifest: CheckpointManifest
    layout: NxdLayout
    dp: int
    zero1: bool

    def check_states(self) -> None:
        """Raise a ConfigError for optimizer state that NxD's format cannot represent."""
        kinds = set(self.meta.kinds)
        problems = []
        if not kinds.issuperset(MEANS):
            problems.append(f"it holds {', '.join(sorted(kinds))}, but no {' and '.join(MEANS)}")
        strange = kinds - {MODEL, *MEANS, MASTER}
        if strange:
            problems.append(
                f"it holds optimizer state {', '.join(sorted(strange))}, which NeuronX Distributed does not support"
            )
        if self._has_master and not self.zero1 and self.meta.dtype != "float32":
            problems.append("NeuronX Distributed keeps float32 master weights with ZeRO-1 only; use --zero1")
        if problems:
            hint = "convert only the weights by --weights-only"
            raise ConfigError([Problem("", f"{self.src}: {problem}", hint=hint) for problem in problems])

    @property
    def _has_master(self) -> bool:
        return MASTER in self.meta.kinds

    def write_weights(self, folder: Path) -> None:
        """Write the weight files of all NxD ranks."""
        folder.mkdir()
        for pp, tp in product(range(self.layout.pp), range(self.layout.tp)):
            params = [self.layout.param(name, tp) for name in self.layout.stage(pp)]
            tied = self.layout.is_tied and pp == 0 and self.layout.pp == 1
            tensors = self._read({MODEL: [param for param in params if not (tied and param.name == HEAD)]})[MODEL]
            if tied:
                tensors[HEAD] = tensors[EMBEDDING]
            _save(tensors, folder / rank_file(tp=tp, pp=pp))

    def write_states(self, folder: Path, rates: OptimizerSettings) -> None:
        """Write the optimizer state files of all NxD ranks."""
        folder.mkdir()
        kinds: tuple[str, ...] = MEANS
        if self._has_master and self.zero1:
            kinds = (*MEANS, MASTER)
        for pp, tp in product(range(self.layout.pp), range(self.layout.tp)):
            names = self.layout.stage(pp)
            tied = self.layout.is_tied and EMBEDDING in names
            whole = [self.layout.param(name, tp) for name in names if not (tied and name == HEAD)]
            groups = _groups(whole, rates)
            order = list(chain.from_iterable(members for _, members in groups))
            for dp in range(self.dp):
                params = order
                if self.zero1:
                    params = [param.rows(dp, self.dp) for param in order]
                tensors = self._read(dict.fromkeys(kinds, params))
                step = torch.tensor(float(self.meta.step))
                state: dict[int, dict[str, Tensor]] = {}
                for number, param in enumerate(params):
                    means = {kind: tensors[kind][param.name] for kind in MEANS}
                    state[number] = {"step": step.clone(), **means}
                content: dict[str, Any] = {"state": state, "param_groups": _param_groups(groups, rates)}
                if self.zero1:
                    shapes = {number: torch.Size(param.shape) for number, param in enumerate(order)}
                    content |= {"state": {}, BASE_STATE: state, "shape_info": shapes}
                if MASTER in kinds:
                    content[MASTERS] = {number: tensors[MASTER][param.name] for number, param in enumerate(params)}
                _save(content, folder / rank_file(dp=dp, tp=tp, pp=pp))

    def _read(self, wanted: Mapping[str, Sequence[Param]]) -> dict[str, dict[str, Tensor]]:
        """Read the tensors of one NxD file from the checkpoint, by kind and name; padding is zero."""
        types = {MODEL: self.meta.dtype, MASTER: "float32"}
        read: dict[str, dict[str, Tensor]] = {}
        targets: dict[TensorShard, Tensor] = {}
        first: dict[object, Tensor] = {}
        again: list[tuple[Tensor, Tensor]] = []
        for kind, params in wanted.items():
            dtype = getattr(torch, types.get(kind, self.meta.state_dtype))
            read[kind] = {param.name: torch.zeros(param.shape, dtype=dtype) for param in params}
            for param in params:
                for whole, block in param.blocks:
                    chunk = TensorShard(kind, param.name, whole, self.layout.shapes[whole], dtype, block)
                    target = block.of(read[kind][param.name])
                    index = (chunk.key, block.offsets)
                    if index in first:  # a rank may hold a head twice
                        again.append((target, first[index]))
                    else:
                        targets[chunk] = first[index] = target
        read_shards(self.src, self.manifest, targets)
        for target, source in again:
            target.copy_(source)
        return read


def _groups(params: Sequence[Param], rates: OptimizerSettings) -> list[tuple[float, list[Param]]]:
    """Weight decay and parameters of the two optimizer groups that NxD's scripts create: matrices and norms."""
    if rates.optim.decay_norms:
        return [(rates.optim.weight_decay, list(params)), (0.0, [])]
    matrices = [param for param in params if "norm" not in param.name]
    norms = [param for param in params if "norm" in param.name]
    return [(rates.optim.weight_decay, matrices), (0.0, norms)]


def _param_groups(groups: Sequence[tuple[float, Sequence[Param]]], rates: OptimizerSettings) -> list[dict[str, Any]]:
    """Parameter groups with the keys of torch's AdamW and of NxD's AdamW; each ignores the other's keys."""
    ours = {"lr": rates.lr, "betas": list(rates.optim.betas), "eps": rates.optim.eps, "initial_lr": rates.optim.lr}
    flags = dict.fromkeys(("amsgrad", "maximize", "capturable", "differentiable"), False)
    theirs = {**flags, "foreach": None, "fused": None, "decoupled_weight_decay": True, "correct_bias": True}
    rows, first = [], 0
    for decay, members in groups:
        ids = list(range(first, first + len(members)))
        rows.append({**ours, **theirs, "weight_decay": decay, "params": ids})
        first += len(members)
    return rows


def _save(content: Mapping[Any, Any], file: Path) -> None:
    try:
        write_durably(file, partial(torch.save, dict(content)))
    except RuntimeError as error:  # torch's writer raises it when the disk is full
        raise CheckpointError(f"cannot write {file}: {str(error).splitlines()[0]}") from error
