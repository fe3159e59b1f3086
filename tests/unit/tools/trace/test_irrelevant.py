"""A run can be traced whatever its data is, and however its ranks are replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.config.check import resolve_config
from nxtrain.config.load import load
from nxtrain.tools.trace.choice import TRACED, backend_of
from nxtrain.tools.trace.command import irrelevant_to

ARROW = ("data.source=arrow", "data.path=x.arrow")


@pytest.mark.parametrize(
    "overrides",
    [
        ("train.eval_every=2", "data.validation_fraction=0.1"),
        (*ARROW, "data.packing=best_fit", "data.workers=7", "data.worker_restarts=0"),
        (*ARROW, "data.validation_path=v.arrow", "train.eval_every=2"),
        ("data.source=arrow", 'data.mixture=["a.arrow", "b.arrow"]', "data.weights=[1.0, 2.0]"),
        ("data.source=tokens", "data.path=x.npy"),
        ("recovery.in_job=true", "recovery.max_restarts=3"),
        *(
            (f"backend.name={name}", f"backend.rounding={rounding}", "precision.type=bf16SR")
            for name in ("auto", "neuron", "neuron-native")
            for rounding in ("software", "hardware")
        ),
    ],
)
def test_keys_that_no_graph_depends_on_keep_no_run_from_a_trace(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    file = tmp_path / "run.toml"
    file.touch()
    config = load(file, overrides).config
    given = [*overrides, *irrelevant_to(config)]
    config = resolve_config(load(file, given), 2, backend_of(config)).config
    traced = [*given, *(f"{key}={value}" for key, value in TRACED.items())]
    plan = resolve_config(load(file, traced), 2)
    assert plan.config.train == config.train
    assert plan.config.model == config.model
