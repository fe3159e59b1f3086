"""Low-rank adapters of experts on every kind of layout, next to PEFT on transformers' mixtures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.backends.torch_kernels import PlainKernels
from nxtrain.common.dimensions import expert_adapter_specs
from nxtrain.common.errors import ConfigError
from nxtrain.common.kernels import RowGroups
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import ShardSpec
from nxtrain.common.stages import split_layers_at
from nxtrain.nn import lora
from nxtrain.nn.lora import EXPERT_TARGETS
from nxtrain.parallel import expert_products
from nxtrain.train.build import build_meta
from nxtrain.train.health.replica_check import ReplicaCheck
from nxtrain.train.step import train_step
from tests.support.drawn import SEED
from tests.support.drawn_runs import check_drawn, error_of, failures, ours, ours_in_static_shapes
from tests.support.layouts import Degrees
from tests.support.lora import DrawnAdapters, all_weights, described, draw_adapters, wanted_of_peft, with_keys
from tests.support.models import MIXTURES, changed
from tests.support.parity import Course, local_pair, start
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


STAGES = [
    Degrees(pp=2),
    Degrees(pp=2, schedule="zero_bubble"),
    Degrees(pp=2, virtual_pp=2),
    Degrees(pp=2, dp=2, shard="zero1"),
    Degrees(pp=2, dp=2, shard="full"),
    Degrees(pp=2, tp=2, sequence_parallel=True),
]


def draw_dense(index: int, degrees: Degrees, dense: int) -> DrawnAdapters:
    """A drawn run with adapters of experts, which the blocks of one stage lack, so that all its weights are frozen."""
    run = draw_adapters("lora of a stage", SEED, index, degrees, family="qwen3_moe")
    number = 2 * degrees.pp * degrees.virtual_pp
    cuts = range(2, number, 2)
    parts = split_layers_at(number, cuts)[dense :: degrees.pp]
    run = with_keys(
        run,
        model__config__num_hidden_layers=number,
        model__config__mlp_only_layers=[block for part in parts for block in part.blocks],
        model__config__decoder_sparse_step=1,
        parallel__pipeline_cuts=list(cuts),
    )
    return replace(run, finetune=(*run.finetune, ("targets", EXPERT_TARGETS)))


@pytest.mark.parametrize("dense", [0, 1])
@pytest.mark.parametrize("index", range(len(STAGES)), ids=lambda index: f"{index}-{STAGES[index]}")
def test_a_stage_without_adapters_trains_with_one_that_has_them(ranks: RankPool, index: int, dense: int) -> None:
    run = draw_dense(index, STAGES[index], dense)
    courses = ranks.run(run.degrees.world, ours, run, all_weights(run))
    assert {len(course.weights) for course in courses} == {0, 8 * run.degrees.virtual_pp}
    check_drawn(courses, wanted_of_peft(run), run, described(run))


def measured(backend: Backend, run: DrawnAdapters, weights: dict[str, Tensor]) -> tuple[list[float], float]:
    """Means of the noise scale after a step, and the number of checksums in which replicas differ."""
    state = start(backend, changed(run.resolved, metrics={"noise_scale": True}), weights)
    assert state.noise is not None
    pair = local_pair(state, run.batches()[0], run.resolved.config.train.micro_batch)
    train_step(state, pair, run.resolved.config.optim.lr)
    _, differing = ReplicaCheck(state).gather()
    return state.noise.means.tolist(), float(differing)


def test_a_stage_without_adapters_takes_part_in_votes_and_in_the_noise_scale(ranks: RankPool) -> None:
    run = draw_dense(3, STAGES[3], 0)
    results = ranks.run(run.degrees.world, measured, run, all_weights(run))
    alone = with_keys(run, parallel__pp=1, parallel__pipeline_cuts=[])
    (means, _), *_ = ranks.run(2, measured, replace(alone, degrees=replace(run.degrees, pp=1)), all_weights(run))
    for of_stage, differing in results:
        assert of_stage == pytest.approx(means, rel=1e-5)
        assert differing == 0


@pytest.mark.parametrize("pp", [1, 2])
def test_targets_that_no_stage_has_are_refused(pp: int) -> None:
    run = draw_dense(0, STAGES[0], 0)
    given = changed(run.resolved, finetune={"targets": ("experts.gate_up_proj", "query")}, parallel={"pp": pp})
    given = changed(given, parallel={"pipeline_cuts": ()})
    with pytest.raises(ConfigError, match="query: no linear layer of the model's blocks has this name"):
        build_meta(given, CpuBackend(), Mesh.build(pp, 0, pp=pp))


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
