"""What the devices of the XLA lane do; imported by name in their process."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from nxtrain.mesh import Axis
from nxtrain.parallel.grads import Gradients
from nxtrain.train.step import DeviceBatch, train_step
from tests.support.models import tokens
from tests.support.parity import GLOBAL_BATCH, LR, Course, local_batch, run_ours, start


def courses(backend: Backend, cases: Sequence[tuple[Resolved, Mapping[str, Tensor]]], steps: int) -> list[Course]:
    """Train each case from its weights."""
    return [run_ours(backend, resolved, steps, weights) for resolved, weights in cases]


def counters() -> dict[str, Any]:
    """What torch-xla counts: graphs compiled, executions, and operations that fell back to the host."""
    import torch_xla.debug.metrics as met

    def executed() -> int:
        data = met.metric_data("ExecuteTime")
        return int(data[0]) if data else 0

    # An execution is counted by a callback of the runtime, some time after its results are there.
    before, now = -1, executed()
    while before != now:
        time.sleep(0.5)
        before, now = now, executed()
    return {
        "compiled": met.counter_value("UncachedCompile") or 0,
        "executed": now,
        "fallbacks": [name for name in met.counter_names() if name.startswith("aten::")],
    }


def steady(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], rates: Sequence[float], mutant: str
) -> list[dict[str, Any]]:
    """Take one step per learning rate, with execution forbidden inside the step; what was counted after each.

    Args:
        backend: Of this rank.
        resolved: The run.
        weights: Whole weights.
        rates: Learning rates.
        mutant: `""`; `lr` passes a number of the host as the rate, `read` looks at the gradient norm inside the step.
    """
    import torch_xla

    state = start(backend, resolved, weights)
    if mutant == "read":
        state = replace(state, gradients=cast(Gradients, _Reading(state.gradients)))
    batch = local_batch(state, tokens(resolved, GLOBAL_BATCH), resolved.config.train.micro_batch)
    backend.step_boundary()
    counts = [counters()]
    for rate in rates:
        lr = torch.tensor(rate).to(backend.device) if mutant == "lr" else backend.scalars(rate)[0]
        torch_xla._XLAC._set_allow_execution(False)
        try:
            result = train_step(state, batch, lr)
        finally:
            torch_xla._XLAC._set_allow_execution(True)
        backend.step_boundary()
        assert math.isfinite(backend.fetch({"norm": result.grad_norm})["norm"])
        counts.append(counters())
    return counts


class _Reading:
    def __init__(self, gradients: Any) -> None:
        self._gradients = gradients

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gradients, name)

    def norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        norm: Tensor = self._gradients.norm(tensors)
        assert norm.item() > 0
        return norm


def mutated_courses(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], steps: int, mutant: str
) -> Course:
    """Train with a defect: `world` averages gradients over all ranks, `norm` keeps the norms' partial sums."""
    comm: Any = backend.collectives
    reduce_bucket = comm.all_reduce_bucket

    def all_reduce_bucket(tensors: Sequence[Tensor], axis: Axis, scale: float = 1.0) -> None:
        if mutant == "norm" and axis.name.startswith("tp"):
            return
        reduce_bucket(tensors, axis, 1.0 / backend.world if mutant == "world" and axis.name == "dp" else scale)

    comm.all_reduce_bucket = all_reduce_bucket
    return run_ours(backend, resolved, steps, weights)


def traced(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], world: int, ranks: Sequence[int]
) -> list[dict[str, Any]]:
    """Record the second step of ranks of a pretended world, executing nothing: the graph's hash and its text."""
    import torch_xla
    import torch_xla.runtime as xr

    from nxtrain.backends.xla import XlaBackend

    device, graphs = str(backend.device), []
    for rank in ranks:
        xr._WORLD_SIZE, xr._ORDINAL = world, rank
        pretended = XlaBackend()
        state = start(pretended, resolved, weights)
        rows = tokens(resolved, 2).unsqueeze(1)
        batch = DeviceBatch(pretended.put(rows[..., :-1].contiguous()), pretended.put(rows[..., 1:].contiguous()))
        torch_xla.sync()
        for _ in range(2):
            result = train_step(state, batch, *pretended.scalars(LR))
            live = [*state.parameters.values(), *(t for kind in state.optimizer.state.values() for t in kind.values())]
            live += [state.optimizer.num_updates, result.loss, result.grad_norm, result.num_tokens]
            found = {
                "hash": torch_xla._XLAC._get_graph_hash(live).hex(),
                "text": torch_xla._XLAC._get_xla_tensors_hlo(live),
            }
            torch_xla._XLAC._clear_pending_irs(device)
            torch_xla._XLAC._set_all_reduce_token(device, None)
        graphs.append(found)
    return graphs
