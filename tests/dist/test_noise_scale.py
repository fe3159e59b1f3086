"""The gradient noise scale next to McCandlish et al.'s formulas on gradients of transformers' model in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.vocab import IGNORE_INDEX
from nxtrain.config.check import Resolved
from nxtrain.parallel.noise_scale import DECAY, NoiseScale
from nxtrain.train.step import train_step
from tests.support.models import changed, hf_model, weights_of
from tests.support.parity import batches, layout, local_pair, run_ours, start
from tests.support.ranks import RankPool

STEPS, SEQ_LEN = 3, 32
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"tp": 1, "dp": 2},
    "dp4-zero1": {"tp": 1, "dp": 4, "shard": "zero1"},
    "tp2-pp2-dp2": {"tp": 2, "pp": 2, "dp": 2, "sp": True},
}


def planned(*, measured: bool = True, **how: Any) -> Resolved:
    resolved = layout("gqa2", **how, batch=8, micro=1, config={"num_hidden_layers": 2, "tie_word_embeddings": False})
    return changed(resolved, metrics={"noise_scale": measured})


def targets_of(batch: Tensor, num_targets: int) -> Tensor:
    """Targets of rows, of which each has the same number."""
    targets = batch[:, 1:].clone()
    targets[:, num_targets:] = IGNORE_INDEX
    return targets


def measured(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], num_targets: int = SEQ_LEN
) -> list[float]:
    """Noise scale after each step, none of which moves a weight."""
    state, values = start(backend, resolved, weights), []
    for batch in batches(resolved, STEPS):
        train_step(state, local_pair(state, (batch[:, :-1], targets_of(batch, num_targets)), 1), 0.0)
        assert state.noise is not None
        values.append(backend.fetch({"noise_scale": state.noise.value()})["noise_scale"])
    return values


def expected(resolved: Resolved, num_targets: int = SEQ_LEN) -> list[float]:
    """Ratios of the running means of equation A.2's estimates, in sequences."""
    parallel, model = resolved.config.parallel, hf_model(resolved).double()
    # With sequence parallelism, each rank has a part of the gradient of a norm's weight, which is left out.
    counted = [p for name, p in model.named_parameters() if parallel.tp == 1 or "norm" not in name]
    large = resolved.config.train.global_batch
    small = large // parallel.dp
    means, ratios = torch.zeros(2, dtype=torch.float64), []
    for batch in batches(resolved, STEPS):
        squares, total = [], [torch.zeros_like(p) for p in counted]
        for rows in batch.chunk(parallel.dp):
            logits = model(input_ids=rows[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets_of(rows, num_targets).flatten())
            grads = torch.autograd.grad(loss, counted)
            squares.append(sum(float(grad.square().sum()) for grad in grads))
            total = [one + grad / parallel.dp for one, grad in zip(total, grads, strict=True)]
        of_small = sum(squares) / parallel.dp
        of_large = sum(float(grad.square().sum()) for grad in total)
        norm = (large * of_large - small * of_small) / (large - small)
        variance = (of_small - of_large) / (1 / small - 1 / large)
        means = DECAY * means + (1 - DECAY) * torch.tensor([variance, norm])
        ratios.append(float(means[0] / means[1]))
    return ratios


@pytest.mark.parametrize("num_targets", [SEQ_LEN, 5])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_meter_follows_the_formulas_on_every_layout(ranks: RankPool, name: str, num_targets: int) -> None:
    """The scale is in sequences, however many of their tokens are targets."""
    resolved = planned(**LAYOUTS[name])
    parallel, wanted = resolved.config.parallel, expected(resolved, num_targets)
    world = parallel.tp * parallel.pp * parallel.dp
    for actual in ranks.run(world, measured, resolved, weights_of(resolved), num_targets):
        assert actual == pytest.approx(wanted, rel=1e-3)


def without_the_factor(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> list[float]:
    """A mutant: the norms of the ranks' gradients are not those of a small batch's mean."""
    sound = NoiseScale.note

    def broken(self: NoiseScale, names: Any, grads: Any) -> None:
        sound(self, names, [grad / 2 for grad in grads])

    with mock.patch.object(NoiseScale, "note", broken):
        return measured(backend, resolved, weights)


def test_a_wrong_factor_is_noticed(ranks: RankPool) -> None:
    resolved = planned(**LAYOUTS["dp2"])
    for actual in ranks.run(2, without_the_factor, resolved, weights_of(resolved)):
        assert actual != pytest.approx(expected(resolved), rel=0.1)


def test_the_meter_changes_no_bit_of_the_course(ranks: RankPool) -> None:
    courses = []
    for is_measured in (False, True):
        resolved = planned(**LAYOUTS["dp2"], measured=is_measured)
        courses.append(ranks.run(2, run_ours, resolved, STEPS, weights_of(resolved))[0])
    assert courses[0].losses == courses[1].losses and courses[0].norms == courses[1].norms
    assert all(torch.equal(courses[0].weights[name], weight) for name, weight in courses[1].weights.items())
