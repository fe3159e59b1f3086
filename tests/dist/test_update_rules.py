"""bf16 weights on real ranks: the same bits in every layout, on every replica, at every step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, global_name
from nxtrain.config.check import Resolved
from nxtrain.optim import adamw
from nxtrain.optim.rounding import rounding_keys
from nxtrain.train.build import build_mesh
from nxtrain.train.step import train_step
from tests.support.adamw import cut, part
from tests.support.models import changed, random, weights_of
from tests.support.parity import Course, batches, layout, local_batch, run_ours, start, table_of
from tests.support.ranks import RankPool

Weights = dict[str, Tensor]

RULES = ["fp32_master", "bf16_stochastic", "bf16_kahan"]
SHARDS = ["zero1", "grad_op", "full"]


def bf16(update: str, state: str = "fp32", shape: str = "odd", **cuts: Any) -> Resolved:
    """A bf16 run whose gradients are never clipped: the norm is summed in an order that the layout decides."""
    resolved = layout(shape, params="bf16", update=update, **cuts)
    return changed(resolved, optim={"clip": 0.0}, precision={"state": state})


def updated_by_given_gradients(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> Weights:
    """Weights of this rank after five updates from whole float32 gradients, equal in every layout."""
    state = start(backend, resolved, weights)
    for step in range(5):
        grads = {name: random(*w.shape, seed=100 * step + i) for i, (name, w) in enumerate(sorted(weights.items()))}
        local = cut(state.layout, grads, state.data_parallel.shards)
        state.optimizer.step(local, torch.tensor(1e-3), torch.tensor(0.7))
    state.data_parallel.publish()
    if resolved.config.parallel.shard == "zero1":  # the whole parameters that the next forward pass reads
        return {name: parameter.detach() for name, parameter in state.model.named_parameters()}
    return {name: shard.detach().bfloat16() for name, shard in state.data_parallel.shards.items()}


@pytest.mark.parametrize("update", RULES)
@pytest.mark.parametrize(
    "cuts",
    [
        {"tp": 1, "dp": 2, "micro": 2},
        {"tp": 2},
        {"tp": 1, "dp": 2, "micro": 2, "shard": "zero1"},
        {"tp": 2, "dp": 2, "micro": 2, "shard": "zero1"},
        {"tp": 1, "dp": 3, "micro": 1, "shard": "full"},
        {"tp": 1, "pp": 2},
        {"tp": 1, "pp": 2, "shape": "tied"},
        {"tp": 2, "pp": 2, "sp": True, "shape": "tied"},
    ],
    ids=["dp2", "tp2", "zero1", "tp2-zero1", "full3", "pp2", "pp2-tied", "tp2-pp2-tied"],
)
def test_equal_gradients_give_equal_bits_in_every_layout(ranks: RankPool, update: str, cuts: dict[str, Any]) -> None:
    alone, resolved = bf16(update, tp=1, shape=cuts.get("shape", "odd")), bf16(update, **cuts)
    (expected,) = ranks.run(1, updated_by_given_gradients, alone, weights_of(alone))
    world = cuts["tp"] * cuts.get("pp", 1) * cuts.get("dp", 1)
    for rank, actual in enumerate(ranks.run(world, updated_by_given_gradients, resolved, weights_of(alone))):
        mesh = build_mesh(resolved, world, rank, world)
        if cuts.get("shard") == "zero1":
            mesh = Mesh.build(world, rank, tp=cuts["tp"])
        whole = whole_of(expected, alone)
        held = Layout(table_of(resolved, mesh), mesh)
        for name, blocks in held.items():
            for block in blocks:
                wanted = part(whole[held.table[name].global_name(name, block.segment)], block)
                assert torch.equal(block.of(actual[name]), wanted), (rank, name)


def whole_of(weights: Weights, resolved: Resolved) -> Weights:
    """Weights of a run with one rank, by global name."""
    mesh = Mesh.build(1, 0)
    blocks = Layout(table_of(resolved, mesh), mesh)
    return {global_name(n, block.segment): block.of(weights[n]) for n, parts in blocks.items() for block in parts}


@pytest.mark.parametrize("update", RULES)
@pytest.mark.parametrize("tp", [1, 2])
def test_every_rule_trains_alike_however_state_is_cut(ranks: RankPool, update: str, tp: int) -> None:
    """Sums of two terms have one order, so that not even a last bit may differ."""
    state = "bf16" if update == "bf16_stochastic" else "fp32"
    how: dict[str, Any] = {"tp": tp, "dp": 2, "sp": tp == 2, "micro": 2}
    replicated = bf16(update, state, **how)
    weights = weights_of(replicated)
    expected = ranks.run(2 * tp, run_ours, replicated, 5, weights)
    # Every rule meets every cut; of a tp of two each rule meets a cut of its own.
    for shard in SHARDS if tp == 1 else SHARDS[RULES.index(update) :][:1]:
        resolved = bf16(update, state, shard=shard, **how)
        assert_alike(ranks.run(2 * tp, run_ours, resolved, 5, weights), expected, resolved, tp)


def assert_alike(courses: Sequence[Course], expected: Sequence[Course], resolved: Resolved, tp: int) -> None:
    """Hold shards against the whole parameters that replicas have."""
    for rank, (actual, want) in enumerate(zip(courses, expected, strict=True)):
        assert actual.losses == want.losses
        assert actual.norms == pytest.approx(want.norms, rel=1e-6)
        mesh = build_mesh(resolved, 2 * tp, rank, 2 * tp)
        for name, blocks in Layout(table_of(resolved, mesh), mesh).items():
            rows = [block.of(actual.weights[name]).to(torch.bfloat16) for block in blocks]
            first = Layout(table_of(resolved, mesh), Mesh.build(2 * tp, rank, tp=tp))[name]
            for block, row in zip(blocks, rows, strict=True):
                (home,) = [b for b in first if b.segment == block.segment]
                offset = block.offsets[0] - home.offsets[0]
                assert torch.equal(row, home.of(want.weights[name])[offset : offset + block.sizes[0]]), name


def hashes(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], steps: int, knows_rank: bool
) -> list[str]:
    """Fingerprint of this rank's weights after each step."""
    plain = rounding_keys
    if knows_rank:

        def ranked(layout: Layout, shards: Any, kind: str, seed: int, put: Any) -> Any:
            return plain(layout, shards, kind, seed + layout.mesh.rank, put)

        adamw.rounding_keys = ranked  # type: ignore[attr-defined]
    try:
        state = start(backend, resolved, weights)
    finally:
        adamw.rounding_keys = plain  # type: ignore[attr-defined]
    results = []
    for batch in batches(resolved, 4) * (steps // 4):
        train_step(state, local_batch(state, batch, 2), 1e-3)
        digest = hashlib.sha256()
        for parameter in state.model.parameters():
            digest.update(parameter.detach().view(torch.int16).numpy().tobytes())
        results.append(digest.hexdigest())
    return results


def test_replicas_stay_bitwise_equal_for_200_steps(ranks: RankPool) -> None:
    resolved = bf16("bf16_stochastic", "bf16", tp=1, dp=2, micro=2)
    first, second = ranks.run(2, hashes, resolved, weights_of(resolved), 200, False)
    assert first == second
    assert len(set(first)) == 200
    first, second = ranks.run(2, hashes, resolved, weights_of(resolved), 4, True)
    assert first[0] != second[0], "a key that knows the rank must be seen"


def ends_of_a_pipeline(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> Weights:
    """Shard of the embedding on this rank after five steps: the table, or the tied copy that projects to scores."""
    state = start(backend, resolved, weights)
    for batch in batches(resolved, 5):
        train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), 1e-3)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    kinds: dict[str, Mapping[str, Tensor]] = {"model": dict(state.model.named_parameters()), **state.optimizer.state}
    return {
        kind: tensors[name].detach().clone() for kind, tensors in kinds.items() for name in names if name in tensors
    }


@pytest.mark.parametrize("update", ["fp32", *RULES])
@pytest.mark.parametrize(
    "cuts", [{"tp": 1, "virtual_pp": 2}, {"tp": 2, "sp": True}, {"tp": 1, "dp": 2, "shard": "zero1"}]
)
def test_a_tied_embedding_and_its_copy_keep_the_same_bits(ranks: RankPool, update: str, cuts: dict[str, Any]) -> None:
    """Weights and what the optimizer keeps of them, which a checkpoint has once."""
    resolved = layout(
        "tied",
        pp=2,
        params="fp32" if update == "fp32" else "bf16",
        update=update,
        micro=1,
        config={"num_hidden_layers": 4},
        **cuts,
    )
    world = 2 * cuts["tp"] * cuts.get("dp", 1)
    weights = weights_of(resolved)
    result = ranks.run(world, ends_of_a_pipeline, resolved, weights)
    for first, last in zip(result[: world // 2], result[world // 2 :], strict=True):
        assert first.keys() == last.keys()
        assert len(first) >= 3  # the weights and two running means
        for kind, tensor in first.items():
            assert torch.equal(tensor, last[kind]), kind
            assert torch.count_nonzero(tensor), kind
