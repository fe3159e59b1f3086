"""Optimizer state in NeuronX Distributed's rank files, with or without sharding over dp by ZeRO-1."""

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
    """Optimizer state of a tag.

    Args:
        grid: Files of the state; dp is 1 without ZeRO-1.
        dtype: Type of the running means; NxD's scripts for XLA_DOWNCAST_BF16 store float32 as float64.
    """

    source: NxdWeights
    grid: Grid
    zero1: bool
    step: int
    dtype: torch.dtype

    @staticmethod
    def open(source: NxdWeights, folder: Path) -> NxdStates:
        """Read the format of a folder's state, and compare it with the weights."""
        grid = Grid.of(folder)
        if (grid.tp, grid.pp) != (source.grid.tp, source.grid.pp):
            degrees = f"tp {grid.tp}, pp {grid.pp} instead of tp {source.grid.tp}, pp {source.grid.pp}"
            raise CheckpointError(f"{folder} has {degrees}")
        first = open_file(folder / rank_file(tp=0, pp=0))
        zero1 = BASE_STATE in first
        state = first.get(BASE_STATE) or first.get("state", {})
        if not state or any(not {"step", *MEANS} <= entry.keys() for entry in state.values()):
            raise CheckpointError(f"{folder} holds no state of AdamW: neither {', '.join(MEANS)} nor a step")
        steps = {int(entry["step"]) for entry in state.values()}
        if len(steps) > 1:
            raise CheckpointError(f"{folder}: parameters have seen different numbers of updates: {sorted(steps)}")
        dtype = next(iter(state.values()))["exp_avg"].dtype
        if dtype == torch.float64:
            dtype = torch.float32
        states = NxdStates(source, grid, zero1, steps.pop(), dtype)
        for pp, ids in enumerate(states._ids):
            if not ids:
                raise CheckpointError(f"{folder} holds no state of the parameters of pipeline stage {pp}")
        return states

    @cached_property
    def _open(self) -> Callable[[int, int, int], Mapping[str, Any]]:
        return self.grid.reader()

    @property
    def has_master(self) -> bool:
        """True if ZeRO-1 updates float32 master weights, which are saved, or made of the weights on resume."""
        return self.zero1 and (MASTERS in self._open(0, 0, 0) or self.source.dtype != torch.float32)

    @cached_property
    def _ids(self) -> list[dict[str, int]]:
        """Number of each parameter in NxD's optimizer, by stage and name."""
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
                        f"{self.grid.folder}: number {number} of stage {pp} is not the state of {name}, {shape}; "
                        "the order of its optimizer's groups is not known here; take the weights alone: --weights-only"
                    )
            stages.append(ids)
        return stages

    @property
    def _state_key(self) -> str:
        if self.zero1:
            return BASE_STATE
        return "state"

    def local(self, kind: str, param: Param, tp: int, pp: int) -> Tensor:
        """Tensor of a kind on a tp and pp rank, with its rows joined over dp."""
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
    """Name and number of each parameter; a group has all parameters, the matrices, or the norms, in model order."""
    norms = [name for name in names if "norm" in name]
    matrices = [name for name in names if "norm" not in name]
    filled = [group for group in groups if group]
    wanted: list[Sequence[str]] = [matrices, norms]
    if len(filled) == 1:
        wanted = [names]
    if len(filled) > 2 or [len(group) for group in filled] != [len(part) for part in wanted]:  # noqa: PLR2004
        sizes = ", ".join(str(len(group)) for group in filled)
        raise CheckpointError(
            f"the optimizer has groups of {sizes} parameters, and neither one of all {len(names)} nor one of the "
            f"{len(matrices)} matrices and one of the {len(norms)} norms; take the weights alone: --weights-only"
        )
    for part, group in zip(wanted, filled, strict=True):
        yield from zip(part, group, strict=True)
