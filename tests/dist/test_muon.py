"""Muon on real ranks: equal gradients give equal bits in every layout, and runs are those of torch's optimizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.checkpoint import directory as folders
from nxtrain.common.distributed.collectives import Pending
from nxtrain.common.machines import MACHINES
from nxtrain.common.mesh import Axis, Mesh
from nxtrain.common.sharding import Layout, ShardSpec
from nxtrain.config.check import Resolved
from nxtrain.config.rule_schedules import BetaPiece
from nxtrain.optim.muon import Muon
from nxtrain.parallel import whole_matrices
from nxtrain.parallel.matrix_rounds import Round, exchanged_bytes, rounds_of
from nxtrain.parallel.whole_matrices import WholeMatrices, hidden_matrices
from nxtrain.plan.job import Job
from nxtrain.plan.muon import muon_work
from nxtrain.train.build import build_mesh
from tests.dist.test_checkpoint_shard_modes import SAVED, resumed, saved_tensors, straight
from tests.dist.test_update_rules import whole_of
from tests.support.adamw import cut, part
from tests.support.drawn import SEED, TRIES, Drawn, draw, one_in
from tests.support.drawn_runs import check_drawn, first_weights, ours, wanted
from tests.support.layouts import Degrees, covering_array
from tests.support.models import changed, random, weights_of
from tests.support.parity import layout, start, table_of
from tests.support.ranks import RankPool

Weights = dict[str, Tensor]

CUTS: dict[str, dict[str, Any]] = {
    "dp2": {"tp": 1, "dp": 2, "micro": 2},
    "dp3-unfused": {"tp": 1, "dp": 3, "batch": 3, "micro": 1, "fused_qkv": False, "fused_gate_up": False},
    "tp2": {"tp": 2},
    "tp4-gqa2": {"tp": 4, "shape": "gqa2"},
    "cp2": {"tp": 1, "cp": 2},
    "zero1": {"tp": 1, "dp": 2, "micro": 2, "shard": "zero1"},
    "tp2-sp-zero1": {"tp": 2, "sp": True, "dp": 2, "micro": 2, "shard": "zero1"},
    "grad_op": {"tp": 1, "dp": 2, "micro": 2, "shard": "grad_op"},
    "full3": {"tp": 1, "dp": 3, "batch": 3, "micro": 1, "shard": "full"},
    "tp2-full": {"tp": 2, "dp": 2, "micro": 2, "shard": "full"},
    "hybrid": {"tp": 1, "dp": 4, "micro": 1, "shard": "hybrid", "shard_size": 2, "config": {"num_hidden_layers": 5}},
    "pp2": {"tp": 1, "pp": 2},
    "tp2-pp2-dp2-tied": {"tp": 2, "pp": 2, "dp": 2, "micro": 1, "sp": True, "shape": "tied"},
}
"""Layouts; ranks of shard x tp exchange rows, and replicas share the work."""

EXPERTS: dict[str, Any] = {
    "family": "qwen3_moe",
    "config": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 5},
}
EXPERT_CUTS: dict[str, dict[str, Any]] = {
    "ep1-dp2": {"dp": 2},
    "ep1-tp2-zero1": {"tp": 2, "sp": True, "dp": 2, "shard": "zero1"},
    "ep1-full": {"dp": 2, "shard": "full"},
    "ep2": {"dp": 2, "ep": 2},
    "ep2-copies": {"dp": 4, "ep": 2},
    "ep4": {"dp": 4, "ep": 4},
    "ep2-tp2": {"tp": 2, "dp": 2, "ep": 2},
    "ep2-cp2": {"cp": 2, "ep": 2},
    "ep2-zero1": {"dp": 4, "ep": 2, "shard": "zero1"},
    "ep2-full": {"dp": 4, "ep": 2, "shard": "full"},
    "ep2-hybrid": {"dp": 4, "ep": 2, "shard": "hybrid", "shard_size": 2},
    "ep2-tp2-pp2": {"tp": 2, "pp": 2, "dp": 2, "ep": 2},
}
CUTS |= {name: {"tp": 1, "micro": 1, **EXPERTS, **cuts} for name, cuts in EXPERT_CUTS.items()}

RULES = [("fp32", "fp32"), ("fp32_master", "fp32"), ("bf16_stochastic", "bf16"), ("bf16_kahan", "fp32")]


def run_of(update: str, state: str, *, shape: str = "odd", **cuts: Any) -> Resolved:
    """A run with Muon whose gradients are never clipped: the norm is summed in an order that the layout decides."""
    params = "fp32" if update == "fp32" else "bf16"
    resolved = layout(shape, params=params, update=update, **cuts)
    optim = {"clip": 0.0, "name": "muon", "adam_lr": 1e-3, "weight_decay_schedule": "decoupled", "weight_decay": 1e-3}
    optim |= {"muon_momentum": 0.6, "muon_momentum_pieces": [BetaPiece(steps=2, to=0.95)]}
    return changed(resolved, optim=optim, precision={"state": state})


def world_of(cuts: Mapping[str, Any]) -> int:
    return math.prod(cuts.get(degree, 1) for degree in ("tp", "pp", "dp", "cp"))


@contextmanager
def broken(mutant: str) -> Iterator[None]:
    """One rule is broken on this rank; none if the name is empty."""
    with pytest.MonkeyPatch.context() as patch:
        if mutant == "shard alone":
            patch.setattr(WholeMatrices, "apply", _alone)
        if mutant == "shared with other experts":
            # All ranks of dp x cp are taken for replicas.
            plain_init = WholeMatrices.__init__

            def init(self: WholeMatrices, matrices: Any, mesh: Mesh, *rest: Any) -> None:
                plain_init(self, matrices, replace(mesh, ep_size=1), *rest)

            patch.setattr(WholeMatrices, "__init__", init)
        if mutant == "fused":
            patch.setattr(whole_matrices, "assemble", _assemble_fused)
            patch.setattr(whole_matrices, "divide", _divide_fused)
        if mutant == "rounded momentum":
            plain = Muon._advance

            def rounding(self: Muon, name: str, grad: Tensor, *rest: Any) -> Tensor:
                ahead = plain(self, name, grad, *rest)
                momentum = self.state["momentum_buffer"][name]
                momentum.copy_(momentum.bfloat16())
                return ahead

            patch.setattr(Muon, "_advance", rounding)
        yield


def _alone(self: WholeMatrices, of: Round, rows: Weights, function: Callable[[Tensor], Tensor]) -> Weights:
    return {name: function(x) for name, x in rows.items()}


ASSEMBLE, DIVIDE = whole_matrices.assemble, whole_matrices.divide


def _assemble_fused(spec: ShardSpec, mesh: Mesh, pieces: Tensor) -> Weights:
    return {"": torch.cat([*ASSEMBLE(spec, mesh, pieces).values()], spec.dim or 0)}


def _divide_fused(spec: ShardSpec, mesh: Mesh, segments: Weights) -> Tensor:
    parts = segments[""].split([segment.size for segment in spec.segments], spec.dim or 0)
    named = {segment.name: part for segment, part in zip(spec.segments, parts, strict=True)}
    return DIVIDE(spec, mesh, named)


def updated_by_given_gradients(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], mutant: str = ""
) -> Weights:
    """Weights of this rank after three updates from whole float32 gradients, equal in every layout."""
    with broken(mutant):
        state = start(backend, resolved, weights)
        for step in range(3):
            grads = {name: random(*w.shape, seed=100 * step + i) for i, (name, w) in enumerate(sorted(weights.items()))}
            local = cut(state.layout, grads, state.data_parallel.shards)
            state.optimizer.step(local, torch.tensor(1e-3), torch.tensor(0.7), torch.tensor(False))
    state.data_parallel.publish()
    if resolved.config.parallel.shard == "zero1":  # the whole parameters that the next forward pass reads
        return {name: parameter.detach() for name, parameter in state.model.named_parameters()}
    return {name: shard.detach().to(state.precision.params) for name, shard in state.data_parallel.shards.items()}


def different(ranks: RankPool, rule: tuple[str, str], cuts: dict[str, Any], mutant: str = "") -> set[str]:
    """Global names of the tensors with bits that differ from those of one rank."""
    model = {key: cuts[key] for key in ("shape", "family", "config") if key in cuts}
    alone, resolved = run_of(*rule, tp=1, **model), run_of(*rule, **cuts)
    weights = weights_of(alone)
    (expected,) = ranks.run(1, updated_by_given_gradients, alone, weights)
    world, whole, actual = world_of(cuts), whole_of(expected, alone), set[str]()
    for rank, shards in enumerate(ranks.run(world, updated_by_given_gradients, resolved, weights, mutant)):
        mesh = build_mesh(resolved, world, rank, world)
        if cuts.get("shard") == "zero1":
            mesh = Mesh.build(world, rank, tp=cuts["tp"], ep=cuts.get("ep", 1))
        held = Layout(table_of(resolved, mesh), mesh)
        for name, blocks in held.items():
            for block in blocks:
                key = held.table[name].global_name(name, block.segment)
                if not torch.equal(block.of(shards[name]), part(whole[key], block)):
                    actual.add(key)
    return actual


# Each layout meets one rule, and each rule meets several layouts; the slow lane has all pairs.
PAIRS = [(name, RULES[index % len(RULES)]) for index, name in enumerate(CUTS)]


@pytest.mark.parametrize(("name", "rule"), PAIRS, ids=str)
def test_equal_gradients_give_equal_bits_in_every_layout(ranks: RankPool, name: str, rule: tuple[str, str]) -> None:
    assert different(ranks, rule, CUTS[name]) == set()


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("name", CUTS)
def test_equal_gradients_give_equal_bits_under_every_rule(ranks: RankPool, name: str, rule: tuple[str, str]) -> None:
    assert different(ranks, rule, CUTS[name]) == set()


@pytest.mark.parametrize(
    ("name", "mutant", "seen"),
    [
        ("tp2", "shard alone", {"q_proj", "o_proj", "up_proj", "down_proj"}),
        ("zero1", "shard alone", {"v_proj", "o_proj", "down_proj"}),
        ("dp2", "fused", {"q_proj", "v_proj", "up_proj"}),
        ("ep2", "fused", {"gate_proj", "up_proj", "down_proj"}),
        ("ep2-zero1", "shard alone", {"gate", "gate_proj", "down_proj"}),
        ("ep2", "shared with other experts", {"gate_proj", "up_proj", "down_proj"}),
        ("dp2", "rounded momentum", {"q_proj", "o_proj", "up_proj", "down_proj"}),
    ],
)
def test_matrices_that_are_not_whole_and_single_are_seen(
    ranks: RankPool, name: str, mutant: str, seen: set[str]
) -> None:
    result = different(ranks, RULES[0], CUTS[name], mutant)
    for layer in ("0", "1"):
        of_layer = {key.split(".")[-2] for key in result if f".layers.{layer}." in key}
        assert seen <= of_layer
    assert all(".layers." in key and "norm" not in key for key in result), "AdamW updates all others"


DRAWS = 8
MORE_DRAWS = 24
EXPERT_DRAWS = 16


def drawn(index: int, degrees: Degrees, lane: str = "muon") -> Drawn:
    """A drawn run whose optimizer is Muon."""
    scale, rate = ("moonlight", "original")[index % 2], (0.0, 3e-4)[index // 2 % 2]
    muon = ("optim.name=muon", f"optim.muon_scale={scale}", f"optim.adam_lr={rate}")
    for attempt in range(TRIES):
        result = draw(lane, SEED, index + attempt * TRIES, degrees)
        # Any gradient gives as large an update, so none may be rounding alone. Queries of one or two keys have little
        # more, and routers have no more if the weight of a token's only expert is 1.
        if result.most_keys > 3 and "model.config.num_experts_per_tok=1" not in result.overrides:
            break
    return replace(result, index=index, overrides=(*result.overrides, *muon))


@pytest.mark.parametrize(
    "index",
    [*range(DRAWS), *(pytest.param(index, marks=pytest.mark.slow) for index in range(DRAWS, MORE_DRAWS))],
)
def test_drawn_runs_are_those_of_torchs_optimizers(ranks: RankPool, index: int) -> None:
    """Losses, norms and weights are within the bounds that hold for AdamW."""
    layouts = covering_array(SEED, MORE_DRAWS)
    degrees = layouts[index % len(layouts)]
    case = drawn(index, degrees)
    courses = ranks.run(degrees.world, ours, case, first_weights(case))
    check_drawn(courses, wanted(case), case)


@pytest.mark.parametrize("index", one_in(6, range(EXPERT_DRAWS)))
def test_drawn_runs_with_experts_are_those_of_torchs_optimizers(ranks: RankPool, index: int) -> None:
    """Each expert has a matrix of its own for gate, values and output."""
    degrees = covering_array(SEED + 3, EXPERT_DRAWS, ep=True)[index]
    case = drawn(index, degrees, "muon-ep-mixtures")
    courses = ranks.run(degrees.world, ours, case, first_weights(case))
    check_drawn(courses, wanted(case), case)


def bytes_of_an_update(backend: Backend, resolved: Resolved, weights: Weights) -> tuple[tuple[int, int], ...]:
    """Bytes that this rank sends in exchanges and gathers of the optimizer, counted and by the formula."""
    state = start(backend, resolved, weights)
    exchanged, gathered = 0, 0
    comm = backend.collectives
    all_to_all, all_gather = comm.start_all_to_all, comm.start_all_gather

    def count_exchange(x: Tensor, axis: Axis) -> Pending[Tensor]:
        nonlocal exchanged
        exchanged += x.nbytes // axis.size * (axis.size - 1)
        return all_to_all(x, axis)

    def count_gather(x: Tensor, axis: Axis) -> Pending[Tensor]:
        nonlocal gathered
        gathered += x.nbytes * (axis.size - 1)
        return all_gather(x, axis)

    grads = {name: torch.ones_like(shard) for name, shard in state.data_parallel.shards.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "start_all_to_all", count_exchange)
        patch.setattr(comm, "start_all_gather", count_gather)
        state.optimizer.step(grads, torch.tensor(1e-3), torch.tensor(1.0))
    mesh, matrices = state.mesh, hidden_matrices(state.model, state.table)
    exchanges = gathers = 0
    for is_expert, axes in ((False, mesh.dense), (True, mesh.experts)):
        own = {name: spec for name, spec in matrices.items() if spec.expert == is_expert}
        holders, helpers = axes.shard.size * mesh.tp.size, 2 if axes.replica.size > 1 else 1
        sums = exchanged_bytes(rounds_of(own, holders * helpers), mesh.tp, axes.shard.size, helpers)
        exchanges, gathers = exchanges + sums[0], gathers + sums[1]
    job = Job(resolved.dimensions, MACHINES["p5.48xlarge"], 1, resolved.config)
    work = muon_work(job, 0)
    planned = (sum(rank_work.exchanged for rank_work in work), sum(rank_work.gathered for rank_work in work))
    assert planned == (exchanges, gathers)
    return (exchanged, gathered), planned


@pytest.mark.parametrize("name", ["dp2", "tp2", "zero1", "tp2-full", "hybrid", "ep2-copies", "ep2-zero1"])
def test_bytes_of_an_update_are_those_of_the_formula(ranks: RankPool, name: str) -> None:
    resolved = run_of("fp32", "fp32", **CUTS[name])
    for counted, formula in ranks.run(world_of(CUTS[name]), bytes_of_an_update, resolved, weights_of(resolved)):
        assert counted == formula
        assert (counted[0] > 0) == (name not in ("dp2", "ep2-copies"))
        assert (counted[1] > 0) == (name in ("dp2", "hybrid", "ep2-copies"))


@pytest.mark.parametrize(("rule", "loaded"), [(RULES[0], "none"), (RULES[2], "full")], ids=str)
def test_a_run_goes_on_with_the_same_bits_under_another_cut(
    ranks: RankPool, tmp_path: Path, rule: tuple[str, str], loaded: str
) -> None:
    """Sums of two terms have one order, so that all is equal, not close."""
    shards = ("none", "zero1", "full")
    plans = {shard: run_of(*rule, tp=1, dp=2, micro=2, shard=shard) for shard in shards}
    weights = weights_of(plans["none"])
    paths = {shard: folders.step_path(tmp_path / shard, SAVED) for shard in shards}
    losses = {shard: ranks.run(2, straight, plan, weights, paths[shard]) for shard, plan in plans.items()}
    want = saved_tensors(paths[loaded])
    kinds = {key.partition("/")[0] for key in want}
    assert {"model", "momentum_buffer", "exp_avg", "exp_avg_sq"} <= kinds
    assert "momentum_buffer/model.layers.0.self_attn.q_proj.weight" in want
    assert "exp_avg/model.layers.0.self_attn.q_proj.weight" not in want
    for shard, plan in plans.items():
        assert losses[shard] == losses[loaded], shard
        actual = saved_tensors(paths[shard])
        assert actual.keys() == want.keys()
        assert [key for key, tensor in want.items() if not torch.equal(actual[key], tensor)] == [], shard
        assert ranks.run(2, resumed, plan, weights, paths[loaded]) == losses[loaded], shard


def test_a_run_goes_on_under_tensor_and_pipeline_parallelism(ranks: RankPool, tmp_path: Path) -> None:
    first = run_of("fp32", "fp32", tp=1, dp=2, micro=2, shard="zero1")
    weights, path = weights_of(first), folders.step_path(tmp_path, SAVED)
    expected = ranks.run(2, straight, first, weights, path)[0]
    layouts: list[dict[str, Any]] = [{"tp": 2}, {"tp": 1, "pp": 2}]
    for cuts in layouts:
        (actual, _) = ranks.run(2, resumed, run_of("fp32", "fp32", **cuts), weights, path)
        assert actual == pytest.approx(expected, abs=2e-6)
