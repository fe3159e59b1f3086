"""Training on a teacher's tokens on any layout: transformers' model with torch's divergence over the vocabulary."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from nxtrain.backends import torch_kernels
from nxtrain.backends.base import Backend
from nxtrain.common.vocab import PROBABILITY_UNITS
from nxtrain.config.check import Resolved
from tests.support.drawn import dense_loss, taught_pairs
from tests.support.models import changed, weights_of
from tests.support.parity import Course, batches, check_course, layout, reference, run_ours
from tests.support.ranks import RankPool

STEPS, K, WEIGHT = 2, 5, 0.75
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-pp2": {"shape": "gqa2", "tp": 2, "pp": 2, "virtual_pp": 2, "sp": True},
    "tp2-odd": {"shape": "odd", "tp": 2},
    "zero1": {"shape": "gqa2", "tp": 1, "dp": 2, "shard": "zero1"},
    "full-cp2": {"shape": "gqa2", "tp": 1, "dp": 2, "shard": "full", "cp": 2},
}


def planned(shape: str, **how: Any) -> Resolved:
    resolved = layout(shape, **how, batch=4, micro=1, config={"num_hidden_layers": 4})
    return changed(resolved, train={"loss_chunk_mib": 1})


def data_of(resolved: Resolved) -> list[tuple[Tensor, Tensor]]:
    pairs = [(batch[:, :-1], batch[:, 1:]) for batch in batches(resolved, STEPS)]
    return taught_pairs(pairs, k=K, vocab_size=resolved.dimensions.vocab_size, weight=WEIGHT, masked=0.2)


@cache
def expected(shape: str) -> Course:
    resolved = planned(shape, tp=1)
    return reference(resolved, STEPS, loss_of=dense_loss(data_of(resolved)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_course_is_the_references(ranks: RankPool, name: str) -> None:
    resolved = planned(**LAYOUTS[name])
    parallel = resolved.config.parallel
    world = parallel.tp * parallel.pp * parallel.dp * parallel.cp
    courses = ranks.run(world, run_ours, resolved, STEPS, weights_of(resolved), data_of(resolved))
    check_course(courses, expected(LAYOUTS[name]["shape"]), resolved)


def of_every_rank(backend: Backend, resolved: Resolved, weights: dict[str, Any], data: Any) -> Course:
    """A mutant: a rank counts the tokens of the teacher that are columns of another rank."""
    sound = torch_kernels._taught

    def taught(targets: Tensor, columns: Any) -> Any:
        counted, here, column, _ = sound(targets, columns)
        return counted, here, column, targets.chunk(2, dim=1)[1].float() / PROBABILITY_UNITS

    with mock.patch.object(torch_kernels, "_taught", taught):
        return run_ours(backend, resolved, STEPS, weights, data)


def test_tokens_of_another_ranks_columns_are_seen(ranks: RankPool) -> None:
    resolved = planned("gqa2", tp=2)
    courses = ranks.run(2, of_every_rank, resolved, weights_of(resolved), data_of(resolved))
    with pytest.raises(AssertionError):
        check_course(courses, expected("gqa2"), resolved)
