"""Python calls of the trainer outside of its steps: the same for each step, and few beside those of the step."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import nxtrain
import nxtrain_models
from nxtrain.train import trainer
from tests.support import runs
from tests.support.commands import outcome

OURS = (*nxtrain.__path__, *nxtrain_models.__path__)
STEPS, LAYERS = 7, 8
COUNTED = (3, 4)
"""Steps whose own calls are counted, which takes seconds."""
MOST_SHARE = 0.02
"""Most calls between two steps over those of a step of two micro-batches."""


def test_the_trainer_makes_few_calls_between_its_steps(tmp_path: Path) -> None:
    step, calls = trainer.update, 0
    inside, outside = list[int](), list[int]()

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call") and frame.f_code.co_filename.startswith(OURS)

    def counted(*args: Any) -> Any:
        nonlocal calls
        outside.append(calls)
        calls = 0
        if len(outside) not in COUNTED:
            sys.setprofile(None)
        result = step(*args)
        inside.append(calls)
        calls = 0
        sys.setprofile(note)
        return result

    config = runs.write_toml(
        tmp_path,
        model={"config": {"num_hidden_layers": LAYERS}},
        train={"steps": STEPS},
        checkpoint={"every": 0},
        metrics={"log_every": 100},
    )
    with mock.patch.object(trainer, "update", counted):
        try:
            code, _, err = outcome("train", config)
        finally:
            sys.setprofile(None)
    assert code == 0, err
    assert len(inside) == STEPS
    of_a_step, again = (inside[step - 1] for step in COUNTED)
    assert of_a_step == again
    steady = outside[3:-1]  # the last step waits for no further data
    assert steady == [steady[0]] * len(steady)
    assert 0 < steady[0] <= MOST_SHARE * of_a_step
