"""Reach of the vote of replicas: a bit turned over in each kind of tensor, in each cut of state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout
from nxtrain.config.check import Resolved
from nxtrain.train.health.replica_check import ReplicaCheck
from nxtrain.train.step import TrainState, train_step
from tests.support.models import weights_of
from tests.support.parity import LR, batches, layout, local_batch, start
from tests.support.ranks import RankPool

NAME = "model.layers.1.mlp.down_proj.weight"


def said(vote: ReplicaCheck, state: TrainState) -> list[str]:
    of_all, differing = vote.gather()
    number = state.backend.fetch({"differing": differing})["differing"]
    mismatches = [str(result) for result in vote.mismatches(of_all)]
    assert number > 0 or not mismatches
    return mismatches if mismatches or not number else ["elsewhere"]


def turned(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], flipped: int, name: str, row: int
) -> dict[str, list[str]]:
    """Findings of the vote, by kind, with a bit turned over in a row of one rank's tensor, which others may lack."""
    state = start(backend, resolved, weights)
    (batch,) = batches(resolved, 1)
    train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), LR)
    vote = ReplicaCheck(state)
    result = {"": said(vote, state)}
    parameters = {item: getattr(p, "_local_tensor", p).detach() for item, p in state.model.named_parameters()}
    for kind, tensors in {"param": parameters, **state.optimizer.state}.items():
        is_here = backend.rank == flipped
        entry = tensors[name][row].view(-1)[-1:] if is_here else torch.zeros(1)
        before = entry.clone()
        if is_here:
            integers = entry.view({2: torch.int16, 4: torch.int32}[entry.dtype.itemsize])
            integers ^= 1
        result[kind] = said(vote, state)
        entry.copy_(before)
    return result


def verdicts(
    ranks: RankPool, flipped: int, name: str, row: int = 0, shape: str = "tied", **cuts: Any
) -> dict[str, list[str]]:
    """Findings by kind, of the ranks that compare it; all others hear that it is elsewhere, and nobody at first."""
    resolved = layout(shape, micro=1, **{"params": "bf16", "update": "fp32_master", **cuts})
    world = cuts["tp"] * cuts.get("pp", 1) * cuts.get("dp", 1)
    by_rank = ranks.run(world, turned, resolved, weights_of(resolved), flipped, name, row)
    words: dict[str, list[str]] = {}
    for result in by_rank:
        assert result.pop("") == []
        for kind, texts in result.items():
            if texts != ["elsewhere"]:
                assert words.setdefault(kind, texts) == texts, "all who compare say the same"
    ranked = [text.split(" in ")[0] for texts in words.values() for text in texts]
    named = [rank for rank in range(world) if any(str(rank) in text for text in ranked)]
    for rank, result in enumerate(by_rank):
        assert rank in named or all(texts in (["elsewhere"], []) for texts in result.values())
    return words


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def of_kind(kind: str, name: str) -> str:
    return name if kind == "param" else f"{kind} of {name}"


NO_MAJORITY = "no majority tells which is right"


def test_whole_copies_are_compared_with_all_of_their_state(ranks: RankPool) -> None:
    words = verdicts(ranks, 2, NAME, row=-1, shape="gqa2", tp=1, dp=4)
    kinds = ("param", "exp_avg", "exp_avg_sq", "master")
    assert words == {kind: [f"rank 2 differs from ranks 0, 1 and 3 in {of_kind(kind, NAME)}"] for kind in kinds}


def test_zero1_compares_parameters_and_cannot_compare_what_one_rank_alone_has(ranks: RankPool) -> None:
    words = verdicts(ranks, 1, NAME, row=-1, shape="gqa2", tp=1, dp=2, shard="zero1")
    assert words.pop("param") == [f"ranks 0 and 1 differ in {NAME}, and {NO_MAJORITY}"]
    assert words == {"exp_avg": [], "exp_avg_sq": [], "master": []}


def test_who_has_no_part_in_it_hears_that_others_differ(ranks: RankPool) -> None:
    words = verdicts(ranks, 3, NAME, row=-1, shape="gqa2", tp=2, dp=2)
    assert words["param"] == [f"ranks 1 and 3 differ in {NAME}, and {NO_MAJORITY}"]


@pytest.mark.parametrize("shard", ["full", "grad_op"])
def test_with_one_copy_in_all_there_is_nothing_to_compare(ranks: RankPool, shard: str) -> None:
    assert not any(verdicts(ranks, 1, NAME, row=-1, shape="gqa2", tp=1, dp=2, shard=shard).values())


@pytest.mark.parametrize(
    ("cuts", "flipped", "name", "who"),
    [
        ({"tp": 1, "pp": 2}, 1, HEAD, "ranks 0 and 1 differ in {}, and no majority tells which is right"),
        ({"tp": 1, "pp": 2, "dp": 2}, 2, HEAD, "rank 2 differs from ranks 0, 1 and 3 in {}"),
        ({"tp": 1, "pp": 2, "dp": 2}, 1, EMBEDDING, "rank 1 differs from ranks 0, 2 and 3 in {}"),
        ({"tp": 2, "pp": 2, "sp": True}, 3, HEAD, "ranks 1 and 3 differ in {}, and no majority tells which is right"),
        (
            {"tp": 1, "pp": 4, "config": {"num_hidden_layers": 4}},
            3,
            HEAD,
            "ranks 0 and 3 differ in {}, and no majority tells which is right",
        ),
    ],
    ids=["pp2", "majority-last", "majority-first", "tp2-pp2", "pp4"],
)
def test_copies_of_a_tied_embedding_are_compared_over_the_stages(
    ranks: RankPool, cuts: dict[str, Any], flipped: int, name: str, who: str
) -> None:
    """With all of their state; stages between the two hear of it."""
    words = verdicts(ranks, flipped, name, **cuts)
    assert words == {
        kind: [who.format(of_kind(kind, EMBEDDING))] for kind in ("param", "exp_avg", "exp_avg_sq", "master")
    }


def test_zero1_compares_the_rows_of_a_tied_embedding_that_two_ranks_alone_have(ranks: RankPool) -> None:
    words = verdicts(ranks, 3, HEAD, tp=1, pp=2, dp=2, shard="zero1")
    assert words.pop("param") == [f"rank 3 differs from ranks 0, 1 and 2 in {EMBEDDING}"]
    for kind in ("exp_avg", "exp_avg_sq", "master"):
        pair = f"ranks 1 and 3 differ in {kind} of {EMBEDDING}, and no majority tells which is right"
        assert words.pop(kind) == [pair]
    assert not words


@pytest.mark.parametrize("shard", ["full", "grad_op"])
def test_shards_of_a_tied_embedding_are_compared_over_the_stages(ranks: RankPool, shard: str) -> None:
    words = verdicts(ranks, 2, HEAD, tp=1, pp=2, dp=2, shard=shard, update="bf16_kahan")
    for kind in ("param", "exp_avg", "exp_avg_sq", "compensation"):
        pair = f"ranks 0 and 2 differ in {of_kind(kind, EMBEDDING)}, and no majority tells which is right"
        assert words[kind] == [pair]


@pytest.mark.parametrize(
    ("cuts", "who"),
    [
        ({"tp": 2}, "ranks 0 and 1 differ in {}, and no majority tells which is right"),
        ({"tp": 4}, "rank 1 differs from ranks 0, 2 and 3 in {}"),
        ({"tp": 2, "dp": 2}, "rank 1 differs from ranks 0, 2 and 3 in {}"),
    ],
)
def test_norm_weights_are_compared_over_tensor_parallel_ranks_and_replicas(
    ranks: RankPool, cuts: dict[str, Any], who: str
) -> None:
    words = verdicts(ranks, 1, "model.norm.weight", **cuts)
    for kind in ("param", "exp_avg", "exp_avg_sq", "master"):
        assert words[kind] == [who.format(of_kind(kind, "model.norm.weight"))]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("cuts", "flipped"), [({"tp": 4}, 2), ({"tp": 2, "dp": 2, "shard": "zero1"}, 1)])
def test_heads_that_ranks_share_are_compared_and_those_that_one_has_are_not(
    ranks: RankPool, cuts: dict[str, Any], flipped: int, fused: bool
) -> None:
    """Two K/V heads on four ranks, in pairs; one on two, whose parameters the replicas have as well."""
    shape = "gqa2" if cuts["tp"] == 4 else "mqa"
    name = f"model.layers.0.self_attn.{'qkv' if fused else 'v'}_proj.weight"
    label = f"{name} (2 copies over tp)" if fused else name
    words = verdicts(ranks, flipped, name, row=-1, shape=shape, fused_qkv=fused, **cuts)
    if cuts["tp"] == 4:
        pair = "ranks 2 and 3 differ in {}, and no majority tells which is right"
        assert words == {kind: [pair.format(of_kind(kind, label))] for kind in words}
        assert len(words) == 4
        queries = f"model.layers.0.self_attn.{'qkv' if fused else 'q'}_proj.weight"
        assert not any(verdicts(ranks, flipped, queries, shape=shape, fused_qkv=fused, **cuts).values())
        return
    assert words["param"] == [f"rank 1 differs from ranks 0, 2 and 3 in {label}"]


def costs(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], rounds: int) -> float:
    """Processor time of a vote over that of a step: the median of rounds, after one that warms up."""
    state = start(backend, resolved, weights)
    vote = ReplicaCheck(state)
    ratios = []
    for batch in batches(resolved, 1) * (1 + rounds):
        begin = time.process_time()
        train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), LR)
        middle = time.process_time()
        vote.gather()
        ratios.append((time.process_time() - middle) / (middle - begin))
    return median(ratios[1:])


@pytest.mark.alone
@pytest.mark.parametrize("update", ["fp32_master", "bf16_stochastic"])
def test_a_vote_costs_no_more_than_a_step_of_few_tokens(ranks: RankPool, update: str) -> None:
    """Of 1024 tokens per rank: every 100 steps, as the recipes have it, no more than 1%. Theirs have 8192 and more."""
    shape = {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 2048, "num_hidden_layers": 4}
    resolved = layout("tied", tp=1, pp=2, batch=32, micro=8, params="bf16", update=update, config=shape)
    result = ranks.run(2, costs, resolved, weights_of(resolved), 5)
    print(result)
    assert max(result) <= 1.0
    assert max(result) > 0.0


EXPERTS = "model.layers.1.block_sparse_moe.experts.down_proj.weight"
ROUTER = "model.layers.1.block_sparse_moe.gate.weight"
OF_MIXTURE: dict[str, Any] = {
    "shape": "gqa2",
    "family": "mixtral",
    "config": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 6},
}


@pytest.mark.parametrize("shard", ["none", "zero1"])
def test_experts_are_compared_between_the_ranks_that_hold_the_same(ranks: RankPool, shard: str) -> None:
    words = verdicts(ranks, 2, EXPERTS, tp=1, dp=4, ep=2, shard=shard, **OF_MIXTURE)
    kinds = ("param", "exp_avg", "exp_avg_sq", "master") if shard == "none" else ("param",)
    for kind in kinds:
        assert words.pop(kind) == [f"ranks 0 and 2 differ in {of_kind(kind, EXPERTS)}, and {NO_MAJORITY}"]
    assert not any(words.values())
    others = verdicts(ranks, 2, ROUTER, tp=1, dp=4, ep=2, shard=shard, **OF_MIXTURE)
    assert others["param"] == [f"rank 2 differs from ranks 0, 1 and 3 in {ROUTER}"]


def test_shards_of_experts_are_compared_between_their_replicas(ranks: RankPool) -> None:
    words = verdicts(
        ranks, 3, EXPERTS, tp=1, dp=4, ep=2, shard="hybrid", shard_size=2, update="bf16_kahan", **OF_MIXTURE
    )
    for kind in ("param", "exp_avg", "exp_avg_sq", "compensation"):
        assert words[kind] == [f"ranks 1 and 3 differ in {of_kind(kind, EXPERTS)}, and {NO_MAJORITY}"]


def false_alarms(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> list[str]:
    """Findings of a vote that takes all data parallel ranks for holders of the same experts."""
    with (
        mock.patch.object(Layout, "axes_of", lambda self, name: self.mesh.dense),
        mock.patch.object(Mesh, "experts", property(lambda self: self.dense)),
    ):
        state = start(backend, resolved, weights)
        return said(ReplicaCheck(state), state)


def test_other_experts_would_be_taken_for_corrupt_ones(ranks: RankPool) -> None:
    resolved = layout(tp=1, dp=2, ep=2, micro=2, **OF_MIXTURE)
    for words in ranks.run(2, false_alarms, resolved, weights_of(resolved)):
        assert any("experts" in text for text in words)
