"""Optimizer state in NeuronX Distributed's rank files, with or without ZeRO-1 sharding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nxtrain.checkpoint.convert.nxd_files import BASE_STATE, MASTER, MASTERS, MEANS, Grid, open_file, rank_file
from nxtrain.checkpoint.convert.nxd_layout import Param
from nxtrain.checkpoint.convert.nxd_weights import NxdWeights
from nxtrain.checkpoint.shards import MODEL
from nxtrain.common.errors import CheckpointError


@dataclass(frozen=True)
class NxdStates:
    """Optimizer state of an NxD checkpoint.

    Args:
        source: Weights of the same checkpoint.
        grid: Rank files of the optimizer state; dp is 1 without ZeRO-1.
        zero1: The state is sharded over data parallel ranks.
        step: Number of updates done.
        dtype: Type of the running means. NxD's scripts for XLA_DOWNCAST_BF16 store float32 as float64.
    """

    source: NxdWeights
    grid: Grid
    zero1: bool
    step: int
    dtype: torch.dtype

    @staticmethod
    def open(source: NxdWeights, folder: Path) -> NxdStates:
        """Detect the format of a folder's optimizer state, and check it against the weights.

        Raises:
            CheckpointError: The state is damaged, or belongs to other weights.
        """
        grid = Grid.of(folder)
        if (grid.tp, grid.pp) != (source.grid.tp, source.grid.pp):
            degrees = f"tp {grid.tp}, pp {grid.pp}, but the weights are for tp {source.grid.tp}, pp {source.grid.pp}"
            raise CheckpointError(f"{folder} is for {degrees}")
        first = open_file(folder / rank_file(tp=0, pp=0))
        zero1 = BASE_STATE in first
        state = first.get(BASE_STATE) or first.get("state", {})
        if not state or any(not {"step", *MEANS} <= entry.keys() for entry in state.values()):
            raise CheckpointError(
                f"{folder} holds no AdamW state: {', '.join(MEANS)} or step is missing; use --weights-only"
            )
        steps = {int(entry["step"]) for entry in state.values()}
        if len(steps) > 1:
            raise CheckpointError(
                f"{folder}: parameters had different numbers of updates: {sorted(steps)}; use --weights-only"
            )
        dtype = next(iter(state.values()))["exp_avg"].dtype
        if dtype == torch.float64:
            dtype = torch.float32
        states = NxdStates(source, grid, zero1, steps.pop(), dtype)
        for pp, ids in enumerate(states._ids):
            if not ids:
                raise CheckpointError(f"{folder} holds no optimizer state for pipeline stage {pp}; use --weights-only")
        return states

    @cached_property
    def _open(self) -> Callable[[int, int, int], Mapping[str, Any]]:
        return self.grid.reader()

    @property
    def has_master(self) -> bool:
        """True if ZeRO-1 updates float32 master weights; a file without them has masters equal to the weights."""
        return self.zero1 and (MASTERS in self._open(0, 0, 0) or self.source.dtype != torch.float32)

    @cached_property
    def _ids(self) -> list[dict[str, int]]:
        """Index of each parameter in NxD's optimizer, by pipeline stage and parameter name."""
        stages = []
        for pp, names in enumerate(self.source.stages):
            content = self._open(0, 0, pp)
            ids = dict(_numbered([group["params"] for group in content["param_groups"]], names))
            entries = content[self._state_key]
            for name, number in ids.items():
                param = self.source.layout.param(name, 0)
                if self.zero1:
                    param = param.rows(0, self.grid.dp)
                shape = param.shape
                if number not in entries or tuple(entries[number]["exp_avg"].shape) != shape:
                    raise CheckpointError(
                        f"{self.grid.folder}: entry {number} of pipeline stage {pp} is not the state of {name} "
                        f"with shape {shape}, so the order of the parameter groups is unknown; use --weights-only"
                    )
            stages.append(ids)
        return stages

    @property
    def _state_key(self) -> str:
        if self.zero1:
            return BASE_STATE
        return "state"

    def local(self, kind: str, param: Param, tp: int, pp: int) -> Tensor:
        """Return an optimizer state tensor of a tp and pp rank, with the rows of all ZeRO-1 ranks."""
        number = self._ids[pp][param.name]
        num_files = 1
        if self.zero1:
            num_files = self.grid.dp
        files = [self._open(dp, tp, pp) for dp in range(num_files)]
        if kind == MASTER and MASTERS not in files[0]:
            return self.source.local(MODEL, param, tp, pp).float()
        if kind == MASTER:
            parts = [file[MASTERS][number] for file in files]
        else:
            parts = [file[self._state_key][number][kind] for file in files]
        whole: Tensor = parts[0]
        if len(parts) > 1:
            whole = torch.cat(parts)
        return whole[: param.shape[0]]


def _numbered(groups: Sequence[Sequence[int]], names: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Match parameter names with the optimizer's indices; a group has all parameters, the matrices, or the norms.

    The parameters of a group are in model order.
    """
    norms = [name for name in names if "norm" in name]
    matrices = [name for name in names if "norm" not in name]
    filled = [group for group in groups if group]
    wanted: list[Sequence[str]] = [matrices, norms]
    if len(filled) == 1:
        wanted = [names]
    if len(filled) > 2 or [len(group) for group in filled] != [len(part) for part in wanted]:  # noqa: PLR2004
        sizes = ", ".join(str(len(group)) for group in filled)
        raise CheckpointError(
            f"the optimizer has groups of {sizes} parameters, but must have one group of all {len(names)}, or one of "
            f"the {len(matrices)} matrices and one of the {len(norms)} norms; use --weights-only"
        )
    for part, group in zip(wanted, filled, strict=True):
        yield from zip(part, group, strict=True)
