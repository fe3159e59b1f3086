"""Logits are those of transformers' Llama in float32, whatever the shape, the layout and the fusing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved
from nxtrain.train.compatibility import RunInputs
from nxtrain.train.context import RunContext
from nxtrain.train.start import start
from tests.support.models import SHAPES, hf_model, our_model, plan, tokens, weights_of
from tests.support.ranks import RankPool

TOLERANCE = 1e-5


@cache
def expected(shape: str) -> Tensor:
    resolved = plan(shape)
    with torch.no_grad():
        logits: Tensor = hf_model(resolved)(input_ids=inputs(resolved)).logits
    return logits


def inputs(resolved: Resolved) -> Tensor:
    return tokens(resolved, batch=2)[:, :-1].contiguous()


def logits_of(backend: Backend, variants: list[Resolved], weights: Mapping[str, Tensor]) -> list[Tensor]:
    results = []
    for resolved in variants:
        mesh = Mesh.build(backend.world, backend.rank, tp=resolved.config.parallel.tp)
        model = our_model(resolved, backend, mesh, weights)
        results.append(model.logits(inputs(resolved)))  # type: ignore[operator]
    return results


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(ranks: RankPool, shape: str, tp: int) -> None:
    variants = [
        plan(shape, parallel={"tp": tp, "sequence_parallel": sp}, model={"fused_qkv": fused, "fused_gate_up": fused})
        for sp in ([False, True] if tp > 1 else [False])
        for fused in (True, False)
    ]
    for actual in ranks.run(tp, logits_of, variants, weights_of(plan(shape))):
        for resolved, logits in zip(variants, actual, strict=True):
            assert (logits - expected(shape)).abs().max() < TOLERANCE, (resolved.config.parallel, resolved.config.model)


def started_logits(backend: Backend, resolved: Resolved) -> Tensor:
    state, *_ = start(RunContext.open(backend, resolved), RunInputs(""))
    return state.lm.logits(inputs(resolved))


@pytest.mark.parametrize("shape", ["tied", "odd"])
def test_a_run_that_starts_from_a_hugging_face_folder_has_its_logits(
    ranks: RankPool, tmp_path: Path, shape: str
) -> None:
    hf_model(plan(shape)).save_pretrained(tmp_path)
    resolved = plan(
        shape,
        model={"hf": str(tmp_path), "init": "hf"},
        parallel={"tp": 2, "sequence_parallel": True},
        checkpoint={"resume": "never"},
    )
    for logits in ranks.run(2, started_logits, resolved):
        assert (logits - expected(shape)).abs().max() < TOLERANCE
