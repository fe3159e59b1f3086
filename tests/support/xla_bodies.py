"""Bodies that the devices of the XLA lane run; imported by name in their process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.neuron.backend import NeuronKernels
from nxtrain.backends.rounding import step_hash
from nxtrain.backends.xla.backend import XlaBackend, XlaCollectives
from nxtrain.common.distributed.collectives import Done, Pending
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.common.sequence_cut import SequenceCut
from nxtrain.common.sharding import Layout, ParamTable, ShardSpec
from nxtrain.config.check import Resolved
from nxtrain.nn.attention import CausalAttention
from nxtrain.optim.rounding import rounding_keys
from nxtrain.parallel.context_parallel import ContextParallel
from nxtrain.parallel.grads import Gradients
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.step import train_step
from tests.support import nxd_xla
from tests.support.drawn import Drawn
from tests.support.drawn_runs import ours
from tests.support.models import our_model, tokens
from tests.support.parity import GLOBAL_BATCH, LR, Course, local_batch, run_ours, start


@dataclass(frozen=True)
class Counts:
    """Counters of torch-xla over all threads of the process."""

    compiled: int
    launched: int
    fallbacks: tuple[str, ...]

    @staticmethod
    def now() -> Counts:
        """Read the counters."""
        import torch_xla.debug.metrics as met

        compiled, cached = (met.counter_value(name) or 0 for name in ("UncachedCompile", "CachedCompile"))
        return Counts(compiled, compiled + cached, tuple(n for n in met.counter_names() if n.startswith("aten::")))


def courses(
    backend: Backend, cases: Sequence[tuple[Resolved, Mapping[str, Tensor]]], steps: int
) -> list[tuple[Course, int]]:
    """Train each case from its weights; what it went through, and how many graphs it took on all devices together."""
    results = []
    for resolved, weights in cases:
        # The counter is that of all devices: none compiles while another reads it.
        backend.collectives.barrier()
        before = Counts.now().compiled
        backend.collectives.barrier()
        course = run_ours(backend, resolved, steps, weights)
        backend.collectives.barrier()
        results.append((course, Counts.now().compiled - before))
    return results


def drawn_courses(backend: Backend, cases: Sequence[tuple[Drawn, dict[str, Tensor]]]) -> list[Course]:
    """Train each drawn run from its weights."""
    return [ours(backend, run, weights) for run, weights in cases]


@dataclass(frozen=True)
class Steps:
    """Counts of torch-xla's work in a series of steps."""

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
        mutant: `""`; `lr` uploads the rate as a number by itself, `read` looks at the gradient norm inside the step.
    """
    import torch_xla

    state = start(backend, resolved, weights)
    if mutant == "read":
        state = replace(state, gradients=cast(Gradients, _Reading(state.gradients)))
    batch = local_batch(state, tokens(resolved, GLOBAL_BATCH), resolved.config.train.micro_batch)
    backend.step_boundary()
    before, counts, refusal = Counts.now(), [], ""
    for rate in rates:
        guarded = Forbidding(backend, folds_numbers=mutant == "lr")
        torch_xla._XLAC._set_allow_execution(False)
        try:
            result = train_step(replace(state, backend=cast(Backend, guarded)), batch, rate)
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


class Forbidding:
    """A backend between whose boundaries nothing may run."""

    def __init__(self, backend: Backend, *, folds_numbers: bool) -> None:
        self._backend, self._folds_numbers = backend, folds_numbers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def scalars(self, *values: float) -> tuple[Tensor, ...]:
        """Upload numbers."""
        if self._folds_numbers:
            return tuple(torch.tensor(value).to(self._backend.device) for value in values)
        return self._backend.scalars(*values)

    def step_boundary(self) -> None:
        """Run what was recorded."""
        import torch_xla

        torch_xla._XLAC._set_allow_execution(True)
        self._backend.step_boundary()
        torch_xla._XLAC._set_allow_execution(False)


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
    results = {}
    for mutant in mutants:
        comm: Any = XlaCollectives(backend.step_boundary)
        comm.start_all_reduce_bucket = _mutated(comm.start_all_reduce_bucket, mutant, backend.world)
        if mutant == "world":
            scatter = comm.start_reduce_scatter
            comm.start_reduce_scatter = lambda x, axis, scale=1.0, scatter=scatter: scatter(
                x, axis, scale if scale == 1.0 else 1.0 / backend.world
            )
        backend.collectives = comm
        results[mutant] = run_ours(backend, resolved, steps, weights)
    return results


def _mutated(start: Callable[..., Any], mutant: str, world: int) -> Any:
    def start_all_reduce_bucket(
        tensors: Sequence[Tensor], axis: Axis, dtype: torch.dtype, scale: float = 1.0
    ) -> Pending[list[Tensor]]:
        if mutant == "norm" and axis.name.startswith("tp"):
            return Done(list(tensors))
        result: Pending[list[Tensor]] = start(
            tensors, axis, dtype, 1.0 / world if mutant == "world" and axis.name == "dp" else scale
        )
        return result

    return start_all_reduce_bucket


def rounded(backend: Backend, numbers: Mapping[str, Tensor], steps: int) -> tuple[list[dict[str, Tensor]], int]:
    """Parameters rounded at random in each of some steps, on the device; and how many graphs that took."""
    layout = Layout(ParamTable({name: ShardSpec(tuple(x.shape)) for name, x in numbers.items()}), Mesh.build(1, 0))
    keys = rounding_keys(layout, numbers, "param", 0, backend.put)
    exact = {name: backend.put(x) for name, x in numbers.items()}
    out = {name: backend.put(torch.zeros(x.shape, dtype=torch.bfloat16)) for name, x in numbers.items()}
    backend.step_boundary()
    before, result = Counts.now().compiled, []
    for step in range(1, steps + 1):
        (number,) = backend.scalars(float(step))
        for name, x in exact.items():
            backend.kernels.stochastic_round(x, out[name], keys[name], step_hash(number))
        backend.step_boundary()
        result.append({name: x.cpu() for name, x in out.items()})
    return result, Counts.now().compiled - before


def document_logits(
    backend: Backend, jobs: Sequence[tuple[Resolved, Mapping[str, Tensor], Tensor, Tensor, Tensor]]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Logits of packed rows with masks between documents and without, and of each document alone."""
    results = []
    for resolved, weights, inputs, starts, alone in jobs:
        model: Any = our_model(resolved, backend, Mesh(1, 0), weights)
        with torch.no_grad():
            on_device = [backend.put(x) for x in (inputs, starts, alone)]
            logits = [model.logits(on_device[0], on_device[1]), model.logits(on_device[0]), model.logits(on_device[2])]
            backend.step_boundary()
        packed, unmasked, item = (x.cpu() for x in logits)
        results.append((packed, unmasked, item))
    return results


def attention_graphs(backend: Backend, length: int, own: int) -> dict[str, str]:
    """HLO of attention forward and backward, which is not run, by kernels, documents and context parallel degree.

    Args:
        backend: Of the device.
        length: Tokens of a sequence.
        own: Rank of a pretended world of two.
    """
    import torch_xla
    import torch_xla.runtime as xr

    xr._WORLD_SIZE, xr._ORDINAL = 2, own
    places = torch.arange(length)
    starts = (places - places % 1000).unsqueeze(0)
    texts = {}
    for kernels in (backend.kernels, NeuronKernels(rounds=False)):
        cut = SequenceCut(length, 2, "zigzag")
        context = ContextParallel(Mesh.build(2, own, cp=2).cp, cut, "gather", backend.collectives, kernels)
        for documents in (False, True):
            for degree in (1, 2):
                positions = places if degree == 1 else context.positions
                shapes = (len(positions), 1, 2, 8), (len(positions), 1, 1, 8)
                q, kv = (backend.put(torch.zeros(shape)).requires_grad_() for shape in shapes)
                given = backend.put(starts[:, positions].contiguous()) if documents else None
                core = CausalAttention(kernels, context if degree == 2 else None)
                core(q, kv, kv, given, backend.put(positions)).sum().backward()
                label = f"{type(kernels).__name__}, documents {documents}, cp {degree}"
                texts[label] = torch_xla._XLAC._get_xla_tensors_hlo([q.grad, kv.grad])
                torch_xla._XLAC._clear_pending_irs(str(backend.device))
    return texts


@dataclass(frozen=True)
class Recorded:
    """A step that was recorded and never run."""

    hash: str
    text: str


def recorded(
    backend: Backend,
    resolved: Resolved,
    weights: Mapping[str, Tensor],
    world: int,
    ranks: Sequence[int],
    mutant: str,
    layers: str = "native",
) -> list[list[Recorded]]:
    """Record the graphs of the first two steps of each of some ranks of a pretended world, executing nothing.

    Args:
        mutant: `""`; `number` keeps the first vocabulary row of a rank as a number, `nxd number` NxD's rank,
            `position number` the first position of a rank.
    """
    return [_record_rank(backend, resolved, weights, world, rank, mutant, layers) for rank in ranks]


def _record_rank(
    backend: Backend,
    resolved: Resolved,
    weights: Mapping[str, Tensor],
    world: int,
    rank: int,
    mutant: str,
    layers: str,
) -> list[Recorded]:
    import torch_xla
    import torch_xla.runtime as xr

    graphs: list[Recorded] = []
    results: list[Tensor] = []

    def cut() -> None:
        kinds = [state.data_parallel.shards, *state.optimizer.state.values()]
        kinds.append(getattr(state.data_parallel, "sums", {}))
        live = [*state.model.parameters(), *(tensor for kind in kinds for tensor in kind.values())]
        live += [state.optimizer.num_updates, state.sums, state.history.entries, *results]
        graph_hash = torch_xla._XLAC._get_graph_hash(live).hex()
        graphs.append(Recorded(graph_hash, torch_xla._XLAC._get_xla_tensors_hlo(live)))
        torch_xla._XLAC._clear_pending_irs(str(backend.device))
        torch_xla._XLAC._set_all_reduce_token(str(backend.device), None)

    xr._WORLD_SIZE, xr._ORDINAL = world, rank
    pretended = XlaBackend(sync=cut)
    if layers == "nxd":
        pretended.binding = nxd_xla.bind(pretended)
        if mutant == "nxd number":
            nxd_xla.number_ranks()
    state = start(pretended, resolved, weights)
    if mutant == "number":
        embedding: Any = state.model.get_submodule("model.embed_tokens")
        first = embedding.first.tolist()
        del embedding.first
        embedding.first = first
    if mutant == "position number":
        rope: Any = state.model.get_submodule("model.rope")
        positions = rope.positions
        first_position = int(positions[0])

        def number_positions(module: Any, inputs: Any) -> None:
            module.positions = torch.arange(len(positions), device=positions.device) + first_position

        rope.register_forward_pre_hook(number_positions)
    run = resolved.config.train
    rows = tokens(resolved, run.global_batch // state.mesh.dp.size).unflatten(0, (-1, run.micro_batch))
    batch = DeviceBatch.of(rows[..., :-1], rows[..., 1:], pretended.put, context_parallel=state.context_parallel)
    torch_xla.sync()
    for _ in range(2):
        result = train_step(state, batch, LR)
        results[:] = [result.loss, result.grad_norm, result.num_tokens]
        pretended.step_boundary()
        results.clear()
    pretended.binding.close()
    return graphs
