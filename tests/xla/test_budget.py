"""Python calls and operations of a traced step: flat in steps and in the world, linear in blocks and batches."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest

import nxtrain
import nxtrain_models
from nxtrain.backends.xla.environment import trace_environment
from nxtrain.backends.xla.tracing import TracingBackend
from tests.support.xla_processes import FAST, start

TP, STEPS = 8, 3
BASE = {"blocks": 2, "micro": 2, "world": 64}
CASES: dict[str, Mapping[str, int]] = {
    "base": {},
    "one more block": {"blocks": 3},
    "another block": {"blocks": 4},
    "one more micro-batch": {"micro": 3},
    "another micro-batch": {"micro": 4},
    "64 worlds": {"world": 4096},
}

OPERATIONS = {"block": 788, "micro-batch": 639}
"""Most operations that a block adds to a step of two micro-batches, and a micro-batch to one of two blocks.

A change that records fewer gets its new number.
"""

OURS = (*nxtrain.__path__, *nxtrain_models.__path__)


def traced(folder: Path) -> None:
    """Write the numbers of calls and of recorded operations in each step of each case."""
    from nxtrain.common.family import find_family
    from nxtrain.config.check import Resolved
    from nxtrain.config.schema import RunConfig
    from nxtrain.tools.trace import trace as tracing
    from nxtrain.train import trainer

    family, result = find_family("llama"), {}
    for name, changes in CASES.items():
        of = {**BASE, **changes}
        shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": of["blocks"]}
        shape |= {"num_attention_heads": TP, "num_key_value_heads": TP, "max_position_embeddings": 16}
        tables: dict[str, Any] = {
            "train": {"seq_len": 16, "global_batch": of["micro"] * of["world"] // TP, "micro_batch": 1},
            "parallel": {"tp": TP, "sequence_parallel": True},
        }
        plan = Resolved(RunConfig.model_validate(tables), family, family.config_type.model_validate(shape))
        steps = list[tuple[int, int]]()
        every = mock.patch.object(tracing, "few_micro_batches", lambda config, _: config.train)
        with mock.patch.object(trainer, "update", counting(trainer.update, steps)), every:
            tracing.trace(plan, of["world"], [0], steps=STEPS, hlo=None)
        result[name] = steps
    (folder / "calls.json").write_text(json.dumps(result), encoding="utf-8")


def operations() -> int:
    """Operations that torch-xla has recorded in this process."""
    from torch_xla.debug import metrics

    return sum(metrics.counter_value(name) for name in metrics.counter_names() if name.startswith("xla::"))


def counting(step: Callable[..., Any], result: list[tuple[int, int]]) -> Callable[..., Any]:
    """A function that appends the calls of and by nxtrain inside a step, without those of the tracing itself.

    With them it appends the operations that the step records.
    """
    boundary = TracingBackend.step_boundary
    calls = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call") and frame.f_code.co_filename.startswith(OURS)

    def uncounted(self: TracingBackend) -> None:
        sys.setprofile(None)
        boundary(self)
        sys.setprofile(note)

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls, before = 0, operations()
        with mock.patch.object(TracingBackend, "step_boundary", uncounted):
            sys.setprofile(note)
            try:
                return step(*args)
            finally:
                sys.setprofile(None)
                result.append((calls, operations() - before))

    return counted


Counts = dict[str, list[list[int]]]
"""Calls and operations of each step, by case."""


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Counts:
    folder = tmp_path_factory.mktemp("budget")
    env = {**trace_environment(os.environ), "OMP_NUM_THREADS": "1", "XLA_FLAGS": FAST}
    done = start(traced, folder, env=env, log=folder / "log.txt").ended(250)
    assert done.code == 0, done.printed
    result: Counts = json.loads((folder / "calls.json").read_text(encoding="utf-8"))
    return result


def test_no_step_costs_more_than_the_one_before(counts: Counts) -> None:
    for steps in counts.values():
        assert steps[1:] == [steps[1]] * (STEPS - 1)


def test_a_step_in_4096_ranks_costs_what_one_in_64_does(counts: Counts) -> None:
    assert counts["64 worlds"][-1] == counts["base"][-1]


@pytest.mark.parametrize("part", ["block", "micro-batch"])
def test_each_block_and_each_micro_batch_costs_the_same(part: str, counts: Counts) -> None:
    none, one, two = (counts[case][-1] for case in ("base", f"one more {part}", f"another {part}"))
    added = [after - before for before, after in zip(none, one, strict=True)]
    assert added == [after - before for before, after in zip(one, two, strict=True)]
    assert added[0] > 0
    assert 0.9 * OPERATIONS[part] < added[1] <= OPERATIONS[part]
