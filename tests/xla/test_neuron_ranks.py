"""The steps of transformers on the backend of Trainium, on two XLA:CPU devices with real collectives."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.neuron.backend import NeuronBackend, NeuronKernels
from nxtrain.config.check import Resolved
from tests.support.models import weights_of
from tests.support.parity import Course, check_course, layout, reference, run_ours
from tests.support.xla_engine import run_devices


def courses(backend: Backend, cases: Sequence[tuple[Resolved, Mapping[str, Tensor]]], steps: int) -> list[Course]:
    """Train each case from its weights, with the classes that a Trainium gets and nothing else."""
    assert type(backend) is NeuronBackend
    assert type(backend.kernels) is NeuronKernels
    return [run_ours(backend, resolved, steps, weights) for resolved, weights in cases]


SEED = 20
STEPS = 3
AXES = ("tp", "dp", "pp")


def drawn(axis: str, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model and how two ranks share it."""
    draw = random.Random(f"{SEED} {axis} {number}")
    heads = draw.choice([4, 8])
    model = {
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in (1, 2, 4, 8) if heads % n == 0]),
        "num_hidden_layers": 4 if axis == "pp" else 2,
        "intermediate_size": draw.randint(70, 130),
        "vocab_size": draw.randint(100, 200),
        "tie_word_embeddings": draw.random() < 0.3,
        "rope_theta": draw.choice([1e4, 5e5]),
    }
    how: dict[str, Any] = {axis: 2, "batch": draw.choice([4, 8]), "remat": draw.choice(["none", "selective", "full"])}
    how["micro"] = draw.choice([1, 2]) if axis != "tp" else draw.choice([1, 2, 4])
    if axis == "tp":
        how["sp"] = draw.random() < 0.5
    if axis == "dp":
        how["shard"] = draw.choice(["none", "zero1"])
    if axis == "pp":
        how["virtual_pp"] = draw.choice([1, 2])
    return model, {"tp": 1, **how}


@pytest.mark.parametrize("axis", AXES)
def test_steps_equal_transformers(axis: str, tmp_path: Path) -> None:
    pairs = [drawn(axis, number) for number in range(1 if axis == "pp" else 2)]
    print(f"seed {SEED}: {pairs}")
    cases = [layout("mha", config=model, **how) for model, how in pairs]
    by_rank = run_devices(2, courses, [(case, weights_of(case)) for case in cases], STEPS, folder=tmp_path, neuron={})
    for case, *result in zip(cases, *by_rank, strict=True):
        check_course(result, reference(case, STEPS), case)
