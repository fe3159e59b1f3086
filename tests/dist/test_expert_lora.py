"""Low-rank adapters of experts on every kind of layout, next to PEFT on transformers' mixtures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.torch_kernels import PlainKernels
from nxtrain.common.dimensions import expert_adapter_specs
from nxtrain.common.kernels import RowGroups
from nxtrain.common.sharding import ShardSpec
from nxtrain.nn import lora
from nxtrain.nn.lora import EXPERT_TARGETS
from nxtrain.parallel import expert_products
from tests.support.drawn import SEED
from tests.support.drawn_runs import check_drawn, error_of, failures, ours, ours_in_static_shapes
from tests.support.layouts import Degrees
from tests.support.lora import DrawnAdapters, all_weights, described, draw_adapters, wanted_of_peft, with_keys
from tests.support.models import MIXTURES
from tests.support.parity import Course
from tests.support.ranks import RankPool

LAYOUTS = [
    Degrees(),
    Degrees(tp=2),
    Degrees(tp=2, sequence_parallel=True),
    Degrees(dp=2, ep=2),
    Degrees(dp=2, ep=2, shard="zero1"),
    Degrees(dp=2, ep=2, shard="full"),
    Degrees(dp=2, shard="grad_op"),
    Degrees(pp=2, dp=2, ep=2),
    Degrees(tp=2, dp=2, ep=2, sequence_parallel=True, shard="full"),
]
TARGETS = [EXPERT_TARGETS, EXPERT_TARGETS[:1], EXPERT_TARGETS[1:], ("q_proj", *EXPERT_TARGETS)]


def draw(index: int, degrees: Degrees) -> DrawnAdapters:
    """A drawn run of a mixture, whose experts have adapters; each second one is of the family of Qwen3."""
    run = draw_adapters("lora of experts", SEED, index, degrees, family=MIXTURES[index % 2])
    return replace(run, finetune=(*run.finetune, ("targets", TARGETS[index % len(TARGETS)])))


@pytest.mark.parametrize("index", range(len(LAYOUTS)), ids=lambda index: f"{index}-{LAYOUTS[index]}")
def test_adapters_of_experts_equal_those_of_peft(ranks: RankPool, index: int) -> None:
    run = draw(index, LAYOUTS[index])
    courses = ranks.run(run.degrees.world, ours, run, all_weights(run))
    check_drawn(courses, wanted_of_peft(run), run, described(run))


@pytest.mark.parametrize("index", [0, 1, 3])
@pytest.mark.parametrize(("dispatch", "factor"), [("dropless", 1.25), ("capacity", 16.0)])
def test_blocks_of_equal_size_have_the_same_adapters(ranks: RankPool, index: int, dispatch: str, factor: float) -> None:
    run = with_keys(draw(index, LAYOUTS[index]), model__moe_dispatch=dispatch, model__moe_capacity_factor=factor)
    courses = ranks.run(run.degrees.world, ours_in_static_shapes, run, all_weights(run))
    check_drawn(courses, wanted_of_peft(run), run, described(run))


def with_defect(backend: Backend, run: DrawnAdapters, weights: dict[str, Tensor], defect: str) -> Course:
    right = expert_adapter_specs

    def without_sum(weight: ShardSpec, r: int) -> tuple[ShardSpec, ShardSpec]:
        a, b = right(weight, r)
        return replace(a, partial_gradient=False), replace(b, partial_gradient=False)

    def unscaled(*of: Any) -> Any:
        return tuple(update and replace(update, factor=1.0) for update in updates_of(*of))

    updates_of = lora._expert_updates
    with pytest.MonkeyPatch.context() as patch:
        if defect == "sum":
            patch.setattr(lora, "expert_adapter_specs", without_sum)
        if defect == "factor":
            patch.setattr(lora, "_expert_updates", unscaled)
        return ours(backend, run, weights)


@pytest.mark.parametrize("defect", ["none", "sum", "factor"])
def test_a_lost_sum_or_factor_of_adapters_would_be_seen(ranks: RankPool, defect: str) -> None:
    run = draw(1, Degrees(tp=2))
    run = replace(run, finetune=(*run.finetune, ("targets", EXPERT_TARGETS), ("alpha", 3.0 * dict(run.finetune)["r"])))
    courses = ranks.run(2, with_defect, run, all_weights(run), defect)
    errors = [(run, error_of(courses, wanted_of_peft(run), run))]
    assert bool(failures(errors)) == (defect != "none"), errors


def test_frozen_matrices_of_experts_have_no_gradient() -> None:
    """Rows that only the gradient of a matrix would need are not kept."""
    rows = torch.randn(3, 4, requires_grad=True)
    matrices = torch.randn(2, 5, 4)
    groups = RowGroups.of(torch.tensor([1, 2]))
    out = expert_products.GroupedProduct.apply(rows, matrices, groups, PlainKernels())
    assert [x is None for x in out.grad_fn.saved_tensors] == [True, False]
