"""Defects that `nxtrain graphs` must notice, each put in the place of a sound method while one run is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.xla import backend, tracing
from nxtrain.backends.xla.backend import XlaBackend, XlaCollectives
from nxtrain.common.distributed.collectives import Pending
from nxtrain.common.mesh import Axis
from nxtrain.config.check import Resolved
from nxtrain.optim.adamw import AdamW
from nxtrain.parallel.grads import Gradients
from nxtrain.tools.trace.trace import trace

STEPS = 2


def traced(backend: Backend, world: int, cases: Sequence[tuple[Resolved, str, Sequence[int]]]) -> list[dict[str, Any]]:
    """The report of each case: a configuration, the name of a defect or none, and the ranks to trace."""
    results = []
    for plan, mutant, ranks in cases:
        with (MUTANTS | PIPELINE_MUTANTS)[mutant]():
            results.append(trace(plan, world, ranks, STEPS, None))
    return results


def _norm(change: Callable[[Gradients, Tensor], Tensor]) -> Callable[[], AbstractContextManager[Any]]:
    sound = Gradients.norm

    def norm(self: Gradients, tensors: Mapping[str, Tensor]) -> Tensor:
        return change(self, sound(self, tensors))

    return lambda: patch.object(Gradients, "norm", norm)


def _rank(gradients: Gradients, norm: Tensor) -> Tensor:
    return norm + float(gradients._layout.mesh.rank)


def _read_result(gradients: Gradients, norm: Tensor) -> Tensor:
    return norm if norm.item() else norm + 1.0  # the line that the report names


def _step(self: AdamW, grads: Mapping[str, Tensor], lr: Tensor, grad_scale: Tensor, skip: Tensor | None = None) -> None:
    assert self.num_updates.tolist()  # the line that the report names
    _SOUND_STEP(self, grads, lr, grad_scale, skip)


_SOUND_STEP = AdamW.step


def _scalars(self: XlaBackend, *values: float) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(value).to(self.device) for value in values)


def _bucket(of: Callable[[Axis, float], tuple[Axis, float]]) -> Callable[[], AbstractContextManager[Any]]:
    sound = XlaCollectives.start_all_reduce_bucket

    def start(
        self: XlaCollectives, tensors: Sequence[Tensor], axis: Axis, dtype: torch.dtype, scale: float = 1.0
    ) -> Pending[list[Tensor]]:
        return sound(self, tensors, *_inserted(dtype, of(axis, scale) if axis.name == "dp" else (axis, scale)))

    return lambda: patch.object(XlaCollectives, "start_all_reduce_bucket", start)


def _inserted(dtype: torch.dtype, where: tuple[Axis, float]) -> tuple[Axis, torch.dtype, float]:
    axis, scale = where
    return axis, dtype, scale


def _everyone(axis: Axis, scale: float) -> tuple[Axis, float]:
    ranks = sorted(rank for group in axis.groups for rank in group)
    return Axis(axis.name, 0, (tuple(ranks),)), scale


def _by_world(axis: Axis, scale: float) -> tuple[Axis, float]:
    return axis, scale / 8


def _own_group(axis: Axis) -> list[list[int]]:
    import torch_xla.runtime as xr

    return [list(group) for group in axis.groups if xr.global_ordinal() in group]


def _of_a_stage(gradients: Gradients, norm: Tensor) -> Tensor:
    """The last rank of stage 1 has a number of its own."""
    mesh = gradients._layout.mesh
    return norm * (2.5 if (mesh.pp.rank, mesh.stage.rank) == (1, mesh.stage.size - 1) else 1.0)


def _sum_of_a_stage() -> AbstractContextManager[Any]:
    """On stage 1 a sum over stages does something beside, within its graph."""
    sound = XlaCollectives._reduced

    def reduced(self: XlaCollectives, op: Any, tensors: Sequence[Tensor], axis: Axis, scale: float) -> list[Tensor]:
        return sound(self, op, tensors, axis, 0.5 if axis.spans_stages and _stage(axis) == 1 else scale)

    return patch.object(XlaCollectives, "_reduced", reduced)


def _stage(axis: Axis) -> int:
    import torch_xla.runtime as xr

    (group,) = (group for group in axis.groups if xr.global_ordinal() in group)
    return group.index(xr.global_ordinal()) * 4 // len(group)


@contextmanager
def _nothing_apart(self: XlaCollectives, axis: Axis) -> Iterator[None]:
    yield


MUTANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "uploaded": lambda: patch.object(tracing, "UPLOADED_ENTRIES", 1 << 40),  # no defect: real storage for all
    "rank": _norm(_rank),
    "lr": lambda: patch.object(XlaBackend, "scalars", _scalars),
    "read a result": _norm(_read_result),
    "read a buffer": lambda: patch.object(AdamW, "step", _step),
    "everyone": _bucket(_everyone),
    "own group": lambda: patch.object(backend, "_groups", _own_group),
    "world": _bucket(_by_world),
    "f64": _norm(lambda _, norm: norm.double().float()),
}

PIPELINE_MUTANTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "stage": _norm(_of_a_stage),
    "sum of a stage": _sum_of_a_stage,
    "joined": lambda: patch.object(XlaCollectives, "_own_graph", _nothing_apart),
}
