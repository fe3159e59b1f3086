"""Training with the z-loss on any layout is that of transformers with torch's AdamW, whose loss adds the same terms."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from nxtrain.backends import torch_kernels
from nxtrain.backends.base import Backend
from nxtrain.config.check import Resolved
from nxtrain.train.step import train_step
from tests.support.models import changed, hf_model, weights_of
from tests.support.parity import Course, batches, check_course, layout, local_batch, reference, run_ours, start
from tests.support.ranks import RankPool

STEPS, LAYERS = 3, 4
Z_LOSS = 1e-2
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2-pp2": {"tp": 2, "pp": 2, "virtual_pp": 2, "sp": True},
    "zero1": {"tp": 1, "dp": 2, "shard": "zero1"},
    "full": {"tp": 1, "dp": 2, "shard": "full"},
}


def planned(**how: Any) -> Resolved:
    resolved = layout("gqa2", **how, batch=4, micro=1, config={"num_hidden_layers": LAYERS})
    return changed(resolved, train={"z_loss": Z_LOSS})


@cache
def expected(z_loss: float = Z_LOSS) -> Course:
    return reference(changed(planned(tp=1), train={"z_loss": z_loss}), STEPS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_course_is_the_references(ranks: RankPool, name: str) -> None:
    resolved = planned(**LAYOUTS[name])
    parallel = resolved.config.parallel
    courses = ranks.run(parallel.tp * parallel.pp * parallel.dp, run_ours, resolved, STEPS, weights_of(resolved))
    check_course(courses, expected(), resolved)
    plain = expected(0.0)
    assert courses[0].losses[1:] != pytest.approx(plain.losses[1:], rel=1e-4), "the terms move the weights"
    assert courses[0].losses[0] == pytest.approx(plain.losses[0], rel=1e-6), "the loss is the cross entropy alone"


def added(backend: Backend, resolved: Resolved, weights: dict[str, Any]) -> list[float]:
    """Terms that each step reports."""
    state, values = start(backend, resolved, weights), []
    for batch in batches(resolved, 2):
        result = train_step(state, local_batch(state, batch, 1), 0.0)
        values.append(backend.fetch({"z_loss": result.others["z_loss"]})["z_loss"])
    return values


@pytest.mark.parametrize("name", ["tp2-pp2", "full"])
def test_the_reported_terms_are_means_over_the_global_batch(ranks: RankPool, name: str) -> None:
    resolved = planned(**LAYOUTS[name])
    model, wanted = hf_model(resolved), []
    for batch in batches(resolved, 2):
        with torch.no_grad():
            logits = model(input_ids=batch[:, :-1]).logits
        wanted.append(Z_LOSS * float(logits.logsumexp(-1).square().mean()))
    parallel = resolved.config.parallel
    for actual in ranks.run(parallel.tp * parallel.pp * parallel.dp, added, resolved, weights_of(resolved)):
        assert actual == pytest.approx(wanted, rel=1e-5)


def without_gradient(backend: Backend, resolved: Resolved, weights: dict[str, Any]) -> Course:
    """A mutant: the terms are reported, and their gradient is left out."""
    sound = torch_kernels.cross_entropy

    def broken(*args: Any, needs_grad: bool, z_loss: float = 0.0) -> Any:
        logits, *rest = args
        loss, _ = sound(logits.clone(), *rest, needs_grad=False, z_loss=z_loss)
        return loss, sound(logits, *rest, needs_grad=needs_grad)[1]

    with mock.patch.object(torch_kernels, "cross_entropy", broken):
        return run_ours(backend, resolved, STEPS, weights)


def test_terms_without_a_gradient_are_another_course(ranks: RankPool) -> None:
    resolved = planned(tp=1)
    courses = ranks.run(1, without_gradient, resolved, weights_of(resolved))
    with pytest.raises(AssertionError):
        check_course(courses, expected(), resolved)
    check_course(courses, expected(0.0), resolved)
