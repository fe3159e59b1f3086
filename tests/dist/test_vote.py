"""What the vote of replicas covers, and what it cannot: a bit turned over in each kind of tensor, in each cut of state."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from nxtrain.train.step import TrainState, train_step
from nxtrain.train.vote import Vote
from tests.support.models import weights_of
from tests.support.parity import LR, batches, layout, local_batch, start
from tests.support.ranks import RankPool

NAME = "model.layers.1.mlp.down_proj.weight"


def found_after_flips(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], flipped: int
) -> dict[str, list[str]]:
    """What the vote says after a step, untouched (``) and with one bit turned over on a rank, by kind of tensor."""
    state = start(backend, resolved, weights)
    (batch,) = batches(resolved, 1)
    train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), LR)
    vote = Vote(state)
    found = {"": said(vote, state)}
    parameters = {name: getattr(p, "_local_tensor", p).detach() for name, p in state.model.named_parameters()}
    for kind, tensors in {"param": parameters, **state.optimizer.state}.items():
        entry = tensors[NAME].view(-1)[-1:]
        before = entry.clone()
        if backend.rank == flipped:
            integers = entry.view({2: torch.int16, 4: torch.int32}[entry.dtype.itemsize])
            integers ^= 1
        found[kind] = said(vote, state)
        entry.copy_(before)
    return found


def said(vote: Vote, state: TrainState) -> list[str]:
    of_all, differing = vote.gather()
    number = state.backend.fetch({"differing": differing})["differing"]
    dissents = [str(found) for found in vote.dissents(of_all)]
    assert number > 0 or not dissents
    return dissents if dissents or not number else ["elsewhere"]


def run(ranks: RankPool, dp: int, flipped: int, tp: int = 1, shard: str = "none") -> list[dict[str, list[str]]]:
    resolved = layout("gqa2", tp=tp, dp=dp, micro=1, params="bf16", update="fp32_master", shard=shard)
    return ranks.run(dp * tp, found_after_flips, resolved, weights_of(resolved), flipped)


def test_whole_copies_are_compared_with_all_of_their_state(ranks: RankPool) -> None:
    for found in run(ranks, dp=4, flipped=2):
        assert found.pop("") == []
        for kind, told in found.items():
            tensor = NAME if kind == "param" else f"{kind} of {NAME}"
            assert told == [f"rank 2 differs from ranks 0, 1 and 3 in {tensor}"]


def test_zero1_compares_parameters_and_cannot_compare_what_one_rank_alone_has(ranks: RankPool) -> None:
    for found in run(ranks, dp=2, flipped=1, shard="zero1"):
        told = f"ranks 0 and 1 differ in {NAME}, and no majority tells which is right"
        assert found == {"": [], "param": [told], "exp_avg": [], "exp_avg_sq": [], "master": []}


def test_who_has_no_part_in_it_hears_that_others_differ(ranks: RankPool) -> None:
    by_rank = run(ranks, dp=2, tp=2, flipped=3)
    for rank, found in enumerate(by_rank):
        told = f"ranks 1 and 3 differ in {NAME}, and no majority tells which is right"
        assert found["param"] == ([told] if rank in {1, 3} else ["elsewhere"])
        assert found[""] == []


@pytest.mark.parametrize("shard", ["full", "grad_op"])
def test_with_one_copy_in_all_there_is_nothing_to_compare(ranks: RankPool, shard: str) -> None:
    for found in run(ranks, dp=2, flipped=1, shard=shard):
        assert not any(found.values())
