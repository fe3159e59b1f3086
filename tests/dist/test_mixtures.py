"""Models with experts under every layout that can meet another: parity with transformers in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable
from nxtrain.config.check import Resolved
from nxtrain.parallel.experts import Experts
from nxtrain.parallel.grads import Gradients
from nxtrain.train.step import TrainState, train_step
from tests.support.drawn import SEED, draw, one_in
from tests.support.drawn_runs import check_drawn, first_weights, ours, wanted
from tests.support.layouts import covering_array
from tests.support.models import MIXTURES, changed, hf_model, weights_of
from tests.support.parity import (
    Gradient,
    batches,
    gradient,
    layout,
    local_batch,
    rank_gradient,
    relative_errors,
    start,
    whole,
)
from tests.support.ranks import RankPool

LAYOUTS = [*covering_array(SEED + 1, 64), *covering_array(SEED + 1, 48, cp=True)]


@pytest.mark.parametrize("index", one_in(8, range(len(LAYOUTS))), ids=lambda index: f"{index}-{LAYOUTS[index]}")
def test_a_drawn_run_with_experts_equals_transformers(ranks: RankPool, index: int) -> None:
    run = draw("mixtures", SEED, index, LAYOUTS[index])
    courses = ranks.run(run.degrees.world, ours, run, first_weights(run))
    check_drawn(courses, wanted(run), run)


def whole_batch(ranks: RankPool, family: str) -> Gradient:
    """Gradient of one process, whose micro-step has the whole batch."""
    result: list[Gradient] = ranks.run(1, rank_gradient, mixture(family), weights_of(mixture(family)))
    return result[0]


def mixture(family: str, **degrees: Any) -> Resolved:
    """A model whose routers' losses have as much of the gradient as the cross entropy."""
    config = {"num_experts_per_tok": 2, "router_aux_loss_coef": 5.0, "intermediate_size": 24}
    config |= {"num_local_experts": 5} if family == "mixtral" else {"num_experts": 5, "moe_intermediate_size": 11}
    dp = degrees.get("dp", 1)
    return layout("gqa2", **{"tp": 1, **degrees}, micro=4 // dp, family=family, config=config, moe_z_loss=0.1)


class _LosesWeights(Experts):
    """A rank takes the gradient of the weights by its part of the experts for the whole one."""

    def forward(self, x: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor | None]:
        size = self._tp.axis.size
        return super().forward(x, weights * (1 / size) + weights.detach() * (1 - 1 / size), indices)


def routers_by_rank(state: TrainState) -> None:
    """Each rank has losses of its own tokens, whose mean is another function."""
    model: Any = state.model
    alone = Mesh(1, 0).dp_cp
    share = 1 / state.mesh.dp_cp.size
    model._router_losses = replace(model._router_losses, axis=alone, num_same=share)


def routers_by_slice(state: TrainState) -> None:
    """Sequence parallel ranks have losses of their own slices."""
    model: Any = state.model
    model._router_losses = replace(model._router_losses, axis=state.mesh.dp_cp, num_same=1)


def tokens_of_all_copies(state: TrainState) -> None:
    """Targets that several sequence parallel ranks have are counted for each."""
    model: Any = state.model
    model._router_losses = replace(model._router_losses, num_same=1)


def lost_weights(state: TrainState) -> None:
    """The sum over tp is left out for the weights of a token's experts."""
    for module in state.model.modules():
        if isinstance(module, Experts):
            module.__class__ = _LosesWeights


def lost_router(state: TrainState) -> None:
    """The sum over tp is left out for the gradient of the router."""
    held = state.data_parallel
    specs = {name: replace(spec, partial_gradient=False) for name, spec in state.table.items() if "gate.weight" in name}
    held.layout = Layout(ParamTable({**state.table, **specs}), state.mesh)


Change = Callable[[TrainState], None]


def unchanged(_: TrainState) -> None:
    """No defect."""


def measured(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], change: Change
) -> tuple[Tensor, Tensor]:
    """Losses of the routers in a step, and the loads of the experts."""
    state = start(backend, resolved, weights)
    change(state)
    (batch,) = batches(resolved, 1)
    own = local_batch(state, batch, resolved.config.train.micro_batch)
    train_step(state, own, 0.0)
    result = train_step(state, own, 1e-3)
    assert result.routing is not None
    assert result.loads is not None
    return result.routing.clone(), result.loads.clone()


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("degrees", [{}, {"dp": 2}, {"cp": 2}, {"tp": 2, "sp": True}, {"tp": 2}, {"pp": 2}])
def test_a_step_measures_the_losses_of_transformers_and_the_load_of_each_expert(
    ranks: RankPool, family: str, degrees: dict[str, Any]
) -> None:
    resolved = mixture(family, **degrees)
    (batch,) = batches(resolved, 1)
    theirs = hf_model(resolved)(input_ids=batch[:, :-1], output_router_logits=True)
    logits = torch.cat(theirs.router_logits)
    losses = torch.stack([theirs.aux_loss, logits.logsumexp(-1).square().mean()])
    loads = torch.stack([load_of_logits(own) for own in theirs.router_logits])
    for actual in ranks.run(2 if degrees else 1, measured, resolved, weights_of(resolved), unchanged):
        torch.testing.assert_close(actual[0], losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(actual[1], loads, rtol=1e-5, atol=0)


def load_of_logits(logits: Tensor, capacity: int | None = None) -> Tensor:
    """Load of a block by the logits of transformers' router."""
    probabilities = logits.softmax(-1)
    slots = torch.bincount(probabilities.topk(2, dim=-1).indices.flatten(), minlength=5)
    entropy = -(probabilities * probabilities.log()).sum()
    dropped = torch.zeros(()) if capacity is None else (slots - capacity).clamp(min=0).sum()
    return torch.cat([slots.float(), torch.stack([torch.tensor(float(len(logits))), entropy, dropped])]).detach()


@pytest.mark.parametrize("degrees", [{}, {"tp": 2, "sp": True}, {"tp": 2}])
def test_slots_beyond_the_capacity_are_counted(ranks: RankPool, degrees: dict[str, Any]) -> None:
    resolved = mixture("qwen3_moe", **degrees)
    resolved = changed(resolved, model={"moe_dispatch": "capacity", "moe_capacity_factor": 0.75})
    (batch,) = batches(resolved, 1)
    logits = hf_model(resolved)(input_ids=batch[:, :-1], output_router_logits=True).router_logits[0]
    capacity = math.ceil(0.75 * 2 * len(logits) / 5)
    want = load_of_logits(logits, capacity)
    assert want[-1] > 0
    for _, loads in ranks.run(2 if degrees else 1, measured, resolved, weights_of(resolved), unchanged):
        torch.testing.assert_close(loads[0], want, rtol=1e-5, atol=0)


def loads_by_slice(state: TrainState) -> None:
    """The sum over tp is left out for the loads of sequence parallel ranks."""
    object.__setattr__(state, "sequence_parallel", False)


def kept_loads(state: TrainState) -> None:
    """A step adds to the loads of the step before."""
    loads: Any = state.loads
    loads.zero_ = lambda: None


@pytest.mark.parametrize(
    ("degrees", "change", "factor"), [({"tp": 2, "sp": True}, loads_by_slice, 0.5), ({}, kept_loads, 2.0)]
)
def test_a_defect_of_loads_is_seen(ranks: RankPool, degrees: dict[str, Any], change: Change, factor: float) -> None:
    resolved = mixture("mixtral", **degrees)
    num_tokens = 4 * resolved.config.train.seq_len
    for _, loads in ranks.run(2 if degrees else 1, measured, resolved, weights_of(resolved), change):
        assert loads[:, -3].tolist() == [factor * num_tokens] * len(loads)


def changed_gradient(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], change: Change) -> Gradient:
    """Gradient of one global batch with a defect."""
    state = start(backend, resolved, weights)
    change(state)
    gradients = Gradients(state.data_parallel, backend.collectives, backend.put, backend.kernels)
    broken = replace(state, gradients=gradients)
    (batch,) = batches(resolved, 1)
    return gradient(broken, local_batch(broken, batch, resolved.config.train.micro_batch))


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize(
    ("degrees", "change", "is_wrong"),
    [
        ({"dp": 2}, unchanged, ""),
        ({"dp": 2}, routers_by_rank, "gate.weight"),
        ({"cp": 2}, routers_by_rank, "gate.weight"),
        ({"tp": 2, "sp": True}, unchanged, ""),
        ({"tp": 2, "sp": True}, routers_by_slice, "gate.weight"),
        ({"tp": 2, "sp": True}, tokens_of_all_copies, "gate.weight"),
        ({"tp": 2, "sp": True}, lost_router, "gate.weight"),
        ({"tp": 2}, lost_weights, "gate.weight"),
        ({"tp": 2, "sp": True}, lost_weights, "gate.weight"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_lost_sum_is_seen(
    ranks: RankPool, family: str, degrees: dict[str, Any], change: Change, is_wrong: str
) -> None:
    resolved = mixture(family, **degrees)
    world = 2
    actual = ranks.run(world, changed_gradient, resolved, weights_of(resolved), change)
    want = whole_batch(ranks, family)
    errors = relative_errors(whole([rank.shards for rank in actual], resolved), whole([want.shards], mixture(family)))
    wrong = {name for name, error in errors.items() if error > 1e-4}
    if not is_wrong:
        assert max(errors.values()) < 1e-5
    else:
        assert {name for name in errors if name.endswith(is_wrong)} <= wrong
    assert [rank.loss for rank in actual] == pytest.approx([want.loss] * world, abs=2e-6), (
        "the logged loss has no other"
    )


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("params", ["bf16", "fp16"])
def test_routers_in_16_bits_have_the_gradients_of_their_losses(ranks: RankPool, family: str, params: str) -> None:
    """The loss scale of fp16 multiplies the losses of the routers as well, and is divided out.

    The load balancing loss is left out: in 16 bits, some tokens choose other experts.
    """
    wide = changed(mixture(family), model={"moe_z_loss": 1.0})
    wide = replace(wide, model=wide.model.model_copy(update={"router_aux_loss_coef": 0.0}))
    loss_scale = 1024.0
    narrow = changed(wide, precision={"params": params, "update": "fp32_master", "loss_scale": loss_scale})
    scale = loss_scale / (4 * narrow.config.train.seq_len) if params == "fp16" else 1.0
    (actual,) = ranks.run(1, rank_gradient, narrow, weights_of(narrow))
    (want,) = ranks.run(1, rank_gradient, wide, weights_of(wide))
    shards = {name: grad / scale for name, grad in actual.shards.items()}
    errors = relative_errors(whole([shards], narrow), whole([want.shards], wide))
    gates = {name: error for name, error in errors.items() if name.endswith("gate.weight")}
    assert gates
    assert max(gates.values()) < 0.02
