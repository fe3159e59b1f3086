"""What the devices of the XLA lane do; imported by name in their process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from nxtrain.backends.base import Backend, Done, Pending
from nxtrain.backends.xla import XlaBackend, XlaCollectives
from nxtrain.config.check import Resolved
from nxtrain.mesh import Axis
from nxtrain.parallel.grads import Gradients
from nxtrain.train.step import DeviceBatch, train_step
from tests.support.models import tokens
from tests.support.parity import GLOBAL_BATCH, LR, Course, local_batch, run_ours, start


@dataclass(frozen=True)
class Counts:
    """What torch-xla has counted, in all threads of the process.

    Args:
        compiled: Graphs that were new.
        launched: Graphs that were run, new or known. The runtime counts an execution some time after its results are
            there; this is counted when it is asked for.
        fallbacks: Operations that left the graph to run on the host.
    """

    compiled: int
    launched: int
    fallbacks: tuple[str, ...]

    @staticmethod
    def now() -> Counts:
        """Read the counters."""
        import torch_xla.debug.metrics as met

        compiled, known = (met.counter_value(name) or 0 for name in ("UncachedCompile", "CachedCompile"))
        return Counts(compiled, compiled + known, tuple(n for n in met.counter_names() if n.startswith("aten::")))


def courses(
    backend: Backend, cases: Sequence[tuple[Resolved, Mapping[str, Tensor]]], steps: int
) -> list[tuple[Course, int]]:
    """Train each case from its weights; what it went through, and how many graphs it took on all devices together."""
    found = []
    for resolved, weights in cases:
        before = Counts.now().compiled
        course = run_ours(backend, resolved, steps, weights)
        found.append((course, Counts.now().compiled - before))
    return found


@dataclass(frozen=True)
class Steps:
    """What a series of steps made torch-xla do.

    Args:
        compiled, launched: Graphs, since before the first step, after each.
        fallbacks: Operations that had left a graph by the end.
        refusal: Why the first step that wanted to run something by itself was stopped; empty if none did.
    """

    compiled: list[int]
    launched: list[int]
    fallbacks: tuple[str, ...]
    refusal: str


def all_steps(
    backend: Backend, cases: Sequence[tuple[Resolved, Mapping[str, Tensor], Sequence[float], str]]
) -> list[Steps]:
    """`steps` of each case."""
    return [steps(backend, *case) for case in cases]


def steps(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], rates: Sequence[float], mutant: str
) -> Steps:
    """Take one step per learning rate, with execution forbidden inside the step.

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
    before, counts, refusal = Counts.now(), [], ""
    for rate in rates:
        lr = torch.tensor(rate).to(backend.device) if mutant == "lr" else backend.scalars(rate)[0]
        torch_xla._XLAC._set_allow_execution(False)
        try:
            result = train_step(state, batch, lr)
        except RuntimeError as error:
            refusal = str(error)
            break
        finally:
            torch_xla._XLAC._set_allow_execution(True)
        backend.step_boundary()
        assert math.isfinite(backend.fetch({"norm": result.grad_norm})["norm"])
        counts.append(Counts.now())
    return Steps(
        [count.compiled - before.compiled for count in counts],
        [count.launched - before.launched for count in counts],
        Counts.now().fallbacks,
        refusal,
    )


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
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], steps: int, mutants: Sequence[str]
) -> dict[str, Course]:
    """Train with each defect: `world` averages gradients over all ranks, `norm` keeps the norms' partial sums."""
    found = {}
    for mutant in mutants:
        comm: Any = XlaCollectives()
        comm.start_all_reduce_bucket = _mutated(comm.start_all_reduce_bucket, mutant, backend.world)
        backend.collectives = comm
        found[mutant] = run_ours(backend, resolved, steps, weights)
    return found


def _mutated(start: Callable[..., Any], mutant: str, world: int) -> Any:
    def start_all_reduce_bucket(
        tensors: Sequence[Tensor], axis: Axis, dtype: torch.dtype, scale: float = 1.0
    ) -> Pending[list[Tensor]]:
        if mutant == "norm" and axis.name.startswith("tp"):
            return Done(list(tensors))
        found: Pending[list[Tensor]] = start(
            tensors, axis, dtype, 1.0 / world if mutant == "world" and axis.name == "dp" else scale
        )
        return found

    return start_all_reduce_bucket


@dataclass(frozen=True)
class Recorded:
    """A step that was recorded and never run.

    Args:
        hash: Of the graph.
        text: Its HLO, as the compiler gets it.
    """

    hash: str
    text: str


def recorded(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], world: int, ranks: Sequence[int], mutant: str
) -> list[Recorded]:
    """Record the first two steps of each of some ranks of a pretended world, executing nothing.

    Args:
        backend: Of the one true device.
        resolved: The run; its accumulation has two micro-batches of one sequence.
        weights: Whole weights.
        world: Ranks of the pretended world.
        ranks: Those to play, one after the other.
        mutant: `""`; `number` keeps the first vocabulary row of a rank as a number.
    """
    import torch_xla
    import torch_xla.runtime as xr

    device, found = str(backend.device), []
    for rank in ranks:
        xr._WORLD_SIZE, xr._ORDINAL = world, rank
        pretended = XlaBackend()
        state = start(pretended, resolved, weights)
        if mutant == "number":
            embedding: Any = state.model.get_submodule("model.embed_tokens")
            first = embedding.first.tolist()
            del embedding.first
            embedding.first = first
        rows = tokens(resolved, 2).unsqueeze(1)
        batch = DeviceBatch(pretended.put(rows[..., :-1].contiguous()), pretended.put(rows[..., 1:].contiguous()))
        torch_xla.sync()
        for _ in range(2):
            result = train_step(state, batch, *pretended.scalars(LR))
            live = [
                *state.model.parameters(),
                *state.data_parallel.shards.values(),
                *(t for kind in state.optimizer.state.values() for t in kind.values()),
            ]
            live += [state.optimizer.num_updates, result.loss, result.grad_norm, result.num_tokens]
            found.append(
                Recorded(
                    torch_xla._XLAC._get_graph_hash(live).hex(),
                    torch_xla._XLAC._get_xla_tensors_hlo(live),
                )
            )
            torch_xla._XLAC._clear_pending_irs(device)
            torch_xla._XLAC._set_all_reduce_token(device, None)
    return found
