"""Weights in NeuronX Distributed's rank files: detection of their sharding, and assembly of unsharded tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxtrain.checkpoint.convert.hf import dtype_name, whole_shapes
from nxtrain.checkpoint.convert.nxd_files import MODEL_DIR, Grid, open_file, rank_file
from nxtrain.checkpoint.convert.nxd_layout import EMBEDDING, HEAD, NxdLayout, Param, Platform, Qkv
from nxtrain.checkpoint.shards import TensorShard, mismatches
from nxtrain.common.errors import CheckpointError, ConfigError, Problem
from nxtrain.common.family import ModelConfig, ModelFamily
from nxtrain.common.sharding import ShardBox


@dataclass(frozen=True)
class NxdWeights:
    """Weights of an NxD checkpoint; if replicas differ, `take_first` uses the first, as in NxD's own converter."""

    grid: Grid
    layout: NxdLayout
    dtype: torch.dtype
    take_first: bool = False

    @staticmethod
    def open(tag: Path, family: ModelFamily, config: ModelConfig, *, take_first: bool) -> NxdWeights:
        """Detect the sharding of an NxD checkpoint, and check its tensors against the model."""
        grid = Grid.of(tag / MODEL_DIR)
        shapes, values = whole_shapes(family, config), config.model_dump(mode="json")
        first = open_file(grid.folder / rank_file(tp=0, pp=0))
        tensors = {name: x for name, x in first.items() if isinstance(x, Tensor)}
        qkv, copies = _qkv_layout(tensors, shapes, values, grid.tp)
        layout = NxdLayout(shapes, values, grid.tp, grid.pp, copies, qkv)
        source = NxdWeights(grid, layout, next(iter(tensors.values())).dtype)
        if source.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise CheckpointError(
                f"weights of {grid.folder} are {source.dtype}; only float32, bfloat16 and float16 can be read"
            )
        source._check()
        if copies > 1:
            source = replace(source, layout=replace(layout, platform=source._platform()))
        return replace(source, take_first=take_first)

    @cached_property
    def _open(self) -> Callable[[int, int, int], Mapping[str, Any]]:
        return self.grid.reader()

    @cached_property
    def stages(self) -> list[list[str]]:
        """Parameter names of each pipeline stage in NxD's order, without a head tied to the stage's embedding."""
        stages = []
        for pp in range(self.grid.pp):
            names = [name for name in self._open(0, 0, pp) if not name.endswith("rotary_emb.inv_freq")]
            tied = self.layout.is_tied and EMBEDDING in names
            stages.append([name for name in names if not (tied and name == HEAD)])
        return stages

    @cached_property
    def owners(self) -> dict[str, tuple[int, str]]:
        """Pipeline stage and name of the first NxD parameter that contains a tensor, by the tensor's global name."""
        owners: dict[str, tuple[int, str]] = {}
        for pp, names in enumerate(self.stages):
            for name in names:
                for whole, _ in self.layout.param(name, 0).blocks:
                    owners.setdefault(whole, (pp, name))
        return owners

    def chunks(self, kind: str, dtype: torch.dtype) -> list[TensorShard]:
        """List all tensors of a kind (weights or an optimizer state), each as one shard with the whole tensor."""
        whole = (TensorShard.whole(name, shape, dtype) for name, shape in self.layout.shapes.items())
        return [replace(chunk, kind=kind) for chunk in whole]

    def local(self, kind: str, param: Param, tp: int, pp: int) -> Tensor:
        """Read the local weight of a parameter from a rank's file."""
        tensor: Tensor = self._open(0, tp, pp)[param.name]
        return tensor

    def assemble(self, chunk: TensorShard, local: Callable[[str, Param, int, int], Tensor]) -> Tensor:
        """Assemble an unsharded tensor from the ranks' shards, and check that replicas are equal.

        Raises:
            CheckpointError: Shards have wrong shapes or types, or replicas differ.
        """
        pp, name = self.owners[chunk.name]
        whole = torch.empty(chunk.shape, dtype=chunk.dtype)
        for tp in range(self.grid.tp):
            param = self.layout.param(name, tp)
            part = local(chunk.kind, param, tp, pp)
            if tuple(part.shape) != param.shape:
                raise CheckpointError(
                    f"{self.grid.folder.parent}: {chunk.kind} of {name} on tp rank {tp} has shape {tuple(part.shape)} "
                    f"instead of {param.shape}"
                )
            for of, block in param.blocks:
                if of == chunk.name:
                    self._place(chunk, whole, block.of(part), block, f"{name}, tp rank {tp}")
        return whole

    def _place(self, chunk: TensorShard, whole: Tensor, part: Tensor, block: ShardBox, where: str) -> None:
        target = replace(block, local_offsets=block.offsets).of(whole)
        exact = part.to(chunk.dtype)
        if part.dtype != chunk.dtype and not torch.equal(exact.to(part.dtype), part):
            raise CheckpointError(
                f"{chunk.key} is {dtype_name(part.dtype)} in {where}, and would lose precision in {chunk.dtype}"
            )
        if block.copy == 0:
            target.copy_(exact)
        elif not self.take_first and not _same_bits(target, exact):
            raise CheckpointError(
                f"replicas of {chunk.key} differ between ranks, by up to {float((target - exact).abs().max()):.3g} "
                f"({where}), as "
                "can happen to norms; --first-copy uses the first rank's, as NeuronX Distributed's converter does"
            )

    def _platform(self) -> Platform:
        """Detect the order of replicated key/value heads: trn1 or trn2, for which the replicas are equal."""
        name = next(name for name in self.layout.shapes if name.endswith("k_proj.weight"))
        chunk = TensorShard.whole(name, self.layout.shapes[name], self.dtype)
        fitting: list[Platform] = []
        for platform in ("trn1", "trn2"):
            tried = replace(self, layout=replace(self.layout, platform=platform))
            try:
                tried.assemble(chunk, tried.local)
                fitting.append(platform)
            except CheckpointError:
                continue
        if not fitting:
            raise CheckpointError(
                f"replicas of {name} differ between ranks, both in the head order of trn1 and of trn2"
            )
        if len(fitting) > 1 and _queries(self.layout, "trn1") != _queries(self.layout, "trn2"):
            raise CheckpointError(f"all heads of {name} are equal, so the order of query heads cannot be detected")
        return fitting[0]

    def _check(self) -> None:
        """Check names, shapes and types of the weights against the model.

        Raises:
            ConfigError: Weights are missing, are unknown, or have other shapes or types.
        """
        wanted: dict[str, object] = {}
        stored: dict[str, object] = {}
        for pp in range(self.grid.pp):
            for name in self.stages[pp]:
                tensor = self._open(0, 0, pp)[name]
                stored[name] = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
                try:
                    wanted[name] = f"{dtype_name(self.dtype)} {self.layout.param(name, 0).shape}"
                except KeyError:
                    continue
        lacking = set(self.layout.shapes)
        for name in wanted:
            lacking.difference_update(whole for whole, _ in self.layout.param(name, 0).blocks)
        problems = mismatches({**wanted, **dict.fromkeys(lacking, "")}, stored)
        if problems:
            raise ConfigError([Problem("", f"{self.grid.folder} does not fit the model: {p}") for p in problems])


def _qkv_layout(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any], tp: int
) -> tuple[Qkv, int]:
    """Detect the storage of q, k and v in rank files, and the number of replicas of each key/value head."""
    kv_rows = next(shape[0] for name, shape in shapes.items() if name.endswith("k_proj.weight"))
    q_rows = next(shape[0] for name, shape in shapes.items() if name.endswith("q_proj.weight"))
    for name, tensor in tensors.items():
        if name.endswith("qkv_proj.weight_k"):
            return "grouped", max(1, tensor.shape[0] * tp // kv_rows)
        if name.endswith("qkv_proj.weight_qkv"):
            return "fused", max(1, (tensor.shape[0] * tp - q_rows) // (2 * kv_rows))
    return "separate", 1


def _queries(layout: NxdLayout, platform: Platform) -> list[object]:
    tried = replace(layout, platform=platform)
    name = next(name for name in layout.shapes if name.endswith("o_proj.weight"))
    return [tried.param(name, rank).blocks for rank in range(layout.tp)]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
