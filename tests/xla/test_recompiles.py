"""Runs that compile while they should train are stopped, and sound ones never are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest

from nxtrain.backends.base import Backend
from nxtrain.common.errors import NxtrainError
from nxtrain.config.check import Resolved
from nxtrain.train import build
from nxtrain.train.command import train_on
from nxtrain.train.context import RunContext
from nxtrain.train.trainer import Trainer
from tests.support.corpora import write_tokenizer
from tests.support.graph_mutants import MUTANTS
from tests.support.runs import SEQ_LEN, run_plan, token_file
from tests.support.xla_engine import run_devices


def endings(backend: Backend, cases: Sequence[tuple[Resolved, str]]) -> list[tuple[str, str]]:
    """Train each case, a configuration and the name of a defect; class and message of what ended it, if any."""
    results = []
    for plan, mutant in cases:
        with DEFECTS[mutant]():
            try:
                train_on(RunContext.open(backend, plan))
                results.append(("", ""))
            except NxtrainError as error:
                results.append((type(error).__name__, str(error)))
    return results


def _whole_steps() -> AbstractContextManager[Any]:
    return patch.object(build, "_accumulates", lambda train, mesh: False)


def _shrinking() -> AbstractContextManager[Any]:
    sound, steps = Trainer._put, []

    def put(self: Trainer, batch: Any) -> Any:
        steps.append(0)
        whole = sound(self, batch)
        rest = slice(-max(0, len(steps) - 2) or None)  # from the third on, each is a token shorter
        return type(whole)([x[:, rest] for x in whole.inputs], [x[:, rest] for x in whole.targets])

    return patch.object(Trainer, "_put", put)


DEFECTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "shape": _shrinking,
    "number": MUTANTS["lr"],
    "whole steps": _whole_steps,
}


LIMIT = 2


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """Class and message of what ended each run, if anything did."""
    folder = tmp_path_factory.mktemp("recompiles")
    data = {"source": "tokens", "path": str(token_file(folder / "tokens.npy", 40)), "validation_fraction": 0.2}
    cadences = {"metrics": {"log_every": 3}, "checkpoint": {"every": 5}, "compile": {"max_recompiles": 0}}
    evaluated = {"eval_every": 4, "eval_batches": 2}
    never = {"checkpoint": {"every": 0}, "metrics": {"log_every": 100}}
    # The rate is 0.25, 0.5, 0.75 and 1.0, and a number that is 1 stands in the graph as such.
    rising = {"lr": 1.0, "min_lr": 1.0, "warmup_steps": 4}
    pieces = [{"steps": 3, "lr": 1.0}, {"steps": 2, "lr": 1.0}, {"steps": 3, "lr": 0.0, "shape": "sqrt"}]
    ramp = {"batch_ramp": [{"global_batch": 1, "samples": 3}, {"global_batch": 2, "samples": 4}]}
    tokenizer, large = write_tokenizer(folder / "tokenizer"), {"config": {"vocab_size": 300}}
    masked = {**data, "doc_mask": True, "tokenizer": str(tokenizer), "validation_fraction": 0.0}
    row = [{"seq_len": SEQ_LEN // 4, "tokens": 9 * SEQ_LEN}, {"seq_len": SEQ_LEN // 2, "tokens": 8 * SEQ_LEN}]
    both = {**ramp, "seq_ramp": row}
    lengths = run_plan(folder / "lengths", masked, steps=8, train=both, model=large, **cadences)
    ramped = run_plan(folder / "ramp", data, steps=8, train={**evaluated, **ramp}, **cadences)
    broken = run_plan(folder / "broken", data, steps=8, train=ramp, compile={"max_recompiles": 0}, **never)
    cases = {
        "ramp": (ramped, ""),
        "ramps of both": (lengths, ""),
        "broken ramp": (broken, "whole steps"),
        "pieces": (
            run_plan(folder / "pieces", data, steps=8, optim={"schedule": "pieces", "pieces": pieces}, **cadences),
            "",
        ),
        "accumulated": (run_plan(folder / "accumulated", data, steps=12, train=evaluated, **cadences), ""),
        "whole": (
            run_plan(folder / "whole", data, steps=12, train={**evaluated, "micro_batch": 4}, optim=rising, **cadences),
            "",
        ),
        "shape": (
            run_plan(
                folder / "shape", data, steps=8, train={"micro_batch": 4}, compile={"max_recompiles": LIMIT}, **never
            ),
            "shape",
        ),
        "number": (
            run_plan(
                folder / "number",
                data,
                steps=6,
                train={"micro_batch": 4},
                optim=rising,
                compile={"max_recompiles": 0},
                **never,
            ),
            "number",
        ),
    }
    (result,) = run_devices(1, endings, list(cases.values()), folder=folder)
    return dict(zip(cases, result, strict=True))


@pytest.mark.parametrize("case", ["accumulated", "whole", "pieces", "ramp", "ramps of both"])
def test_logs_evaluations_and_checkpoints_at_any_step_compile_nothing_new(
    case: str, ended: dict[str, tuple[str, str]]
) -> None:
    assert ended[case] == ("", "")


def test_a_ramp_whose_single_micro_batches_are_one_graph_with_the_update_compiles_more(
    ended: dict[str, tuple[str, str]],
) -> None:
    kind, message = ended["broken ramp"]
    assert kind == "BackendError" and message.startswith("step 4 (training) compiled 2 new graphs")


def test_a_shape_that_changes_ends_the_run_after_the_limit(ended: dict[str, tuple[str, str]]) -> None:
    kind, message = ended["shape"]
    assert kind == "BackendError"
    assert message.startswith(f"step 5 (training) compiled a new graph, recompilation {LIMIT + 1} of this process")
    assert "Recompiled: step 3 (training), step 4 (training), step 5 (training)." in message


def test_a_rate_that_stands_in_the_graph_is_noticed_when_it_makes_another(ended: dict[str, tuple[str, str]]) -> None:
    kind, message = ended["number"]
    assert kind == "BackendError"
    assert message.startswith("step 4 (training) compiled a new graph, recompilation 1 ")
