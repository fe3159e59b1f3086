"""Steps that are not finite, and checksums, on an XLA device: no bit of a weight, no further graph, the CPU's sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nxtrain.backends.cpu import CpuKernels
from nxtrain.train.vote import checksums, factors
from tests.support.layers import random
from tests.support.models import changed, weights_of
from tests.support.parity import layout
from tests.support.runs import run_plan, token_file
from tests.support.xla_engine import run_devices
from tests.support.xla_guard import Skipping, skippings, summed, voted

SPOILED = "param model.norm.weight"
RULES: list[dict[str, Any]] = [
    {"params": "fp32", "update": "fp32"},
    {"params": "bf16", "update": "fp32_master"},
    {"params": "bf16", "update": "bf16_stochastic"},
    {"params": "bf16", "update": "bf16_kahan"},
]


def check(course: Skipping) -> None:
    """Bad steps change nothing, but that the weight by which they are bad may be set right from what is kept of it."""
    changes = [{name for name in names if name != SPOILED} for names in course.changed]
    assert [bool(names) for names in changes] == [True, True, False, False, True, True], course
    assert course.skipped[-6:] == [0, 0, 1, 1, 0, 0]


def test_a_bad_step_changes_no_bit_under_any_rule_and_is_the_graph_of_the_others(tmp_path: Path) -> None:
    plans = [layout("gqa2", tp=1, micro=4, **rule) for rule in RULES]
    plans.append(changed(plans[-1], precision={"state": "bf16"}))
    (found,) = run_devices(1, skippings, [(plan, weights_of(plan)) for plan in plans], folder=tmp_path)
    for rule, course in zip([*RULES, "kahan, bf16 state"], found, strict=True):
        check(course)
        assert sum(course.compiled) == course.compiled[0] == 1, rule
        assert course.fallbacks == ()


def test_bad_steps_of_two_ranks_with_cut_state_change_no_bit(tmp_path: Path) -> None:
    plan = layout("gqa2", tp=1, dp=2, micro=2, shard="zero1", params="bf16", update="bf16_kahan")
    for (course,) in run_devices(2, skippings, [(plan, weights_of(plan))], folder=tmp_path):
        check(course)


def test_a_run_that_votes_finds_equal_replicas_equal_and_compiles_nothing_again(tmp_path: Path) -> None:
    data = {"source": "tokens", "path": str(token_file(tmp_path / "rows.npy", 40))}
    plan = run_plan(
        tmp_path / "run",
        data,
        steps=8,
        train={"micro_batch": 2},
        parallel={"tp": 1, "dp": 2},
        metrics={"log_every": 3},
        checkpoint={"every": 0},
        compile={"max_recompiles": 0},
        recovery={"vote_every": 2},
    )
    assert run_devices(2, voted, plan, folder=tmp_path) == ["", ""]


def test_checksums_are_those_of_the_cpu(tmp_path: Path) -> None:
    tensors = {"a": random(33, 17), "b": random(7).to(torch.bfloat16), "c": random(3, 4, 5), "d": -random(2, 2)}
    ((found),) = run_devices(1, summed, tensors, folder=tmp_path)
    assert found == checksums(tensors, CpuKernels(), factors(64)).tolist()
