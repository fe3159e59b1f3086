"""Runs of drawn shapes, batches, masks and update rules in one process, beside transformers with `torch.optim`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from nxtrain.backends import open_backend
from nxtrain.backends.base import Backend
from nxtrain.parallel import linear
from tests.support.drawn import FAMILIES, OWN_SEED, SEED, Drawn, draw, one_in
from tests.support.drawn_fp16 import WORSE, Distance, distances, root_mean_square
from tests.support.drawn_runs import error_of, failures, ours, wanted
from tests.support.drawn_runs import first_weights as weights_of
from tests.support.models import SCALING_TYPES, WITH_EXPERTS
from tests.support.narrow_gradients import Errors, errors_of_tensors

BATCHES, EACH = 8, 25
NUM_BF16 = 40
DRAWS_EACH = range(4)
"""Draws of each family whose gradients are compared by kind of tensor."""


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # shapes are small
    yield open_backend("cpu")
    torch.set_num_threads(threads)


@pytest.mark.parametrize("batch", one_in(4, range(BATCHES)))
def test_drawn_runs_equal_transformers_in_float32(backend: Backend, batch: int) -> None:
    runs = [draw("process", SEED, index) for index in range(batch * EACH, (batch + 1) * EACH)]
    errors = []
    for run in runs:
        weights = weights_of(run)
        errors.append((run, error_of([ours(backend, run, weights)], wanted(run, weights), run)))
    assert not failures(errors), failures(errors)


@pytest.mark.parametrize("batch", one_in(4, range(8)))
def test_drawn_runs_of_mixtures_equal_transformers_in_float32(backend: Backend, batch: int) -> None:
    indices = range(batch * 12, (batch + 1) * 12)
    runs = [draw("process-mixtures", SEED, index) for index in indices]
    errors = []
    for run in runs:
        weights = weights_of(run)
        errors.append((run, error_of([ours(backend, run, weights)], wanted(run, weights), run)))
    assert not failures(errors), failures(errors)


def test_draws_reach_every_kind_of_run() -> None:
    """A draw that never comes proves nothing."""
    runs = [draw("process", OWN_SEED, index).resolved for index in range(BATCHES * EACH)]
    models = [run.model for run in runs]
    kinds = {
        "as many K/V heads as heads, split projections": [
            m.num_kv_heads == m.num_attention_heads and not r.config.model.fused_qkv  # type: ignore[attr-defined]
            for m, r in zip(models, runs, strict=True)
        ],
        "grouped queries": [1 < m.num_kv_heads < m.num_attention_heads for m in models],  # type: ignore[attr-defined]
        "heads apart from the hidden size": [
            m.head_size * m.num_attention_heads != m.hidden_size  # type: ignore[attr-defined]
            for m in models
        ],
        "tied": [m.tie_word_embeddings for m in models],
        **{
            f"scaling of rotary positions: {rope_type}": [
                getattr(m.rope_scaling, "rope_type", "") == rope_type  # type: ignore[attr-defined]
                for m in models
            ]
            for rope_type in SCALING_TYPES
        },
        "one sequence at a time": [r.config.train.micro_batch == 1 for r in runs],
        "accumulation": [r.config.train.global_batch > r.config.train.micro_batch for r in runs],
        "one token": [r.config.train.seq_len == 1 for r in runs],
        "a block of attention and one more": [r.config.train.seq_len in (129, 257) for r in runs],
        "several chunks of the loss": [
            4 * t.micro_batch * t.seq_len * m.vocab_size > t.logits_mib("cpu") << 20
            for m, t in zip(models, [r.config.train for r in runs], strict=True)
        ],
        **{f"remat {how}": [r.config.train.remat == how for r in runs] for how in ("none", "selective", "full")},
        "no clipping": [r.config.optim.clip == 0 for r in runs],
        "decay of norms": [r.config.optim.decay_norms for r in runs],
    }
    least = BATCHES * EACH // 50
    assert {kind: sum(result) for kind, result in kinds.items() if sum(result) < least} == {}


@pytest.fixture(scope="module")
def in_bf16(backend: Backend) -> list[tuple[Drawn, Distance, Distance]]:
    runs = [draw("bf16", SEED, index, bf16=True) for index in range(NUM_BF16)]
    return [(run, *distances(backend, run)) for run in runs]


def test_gradients_in_bf16_are_as_exact_as_those_of_transformers(
    in_bf16: list[tuple[Drawn, Distance, Distance]],
) -> None:
    worse = [
        f"{mine.gradient:.1e} against {theirs.gradient:.1e}: {run.reproduce}"
        for run, mine, theirs in in_bf16
        if not mine.gradient <= WORSE * theirs.gradient
    ]
    assert not worse, "\n".join(worse)


@pytest.mark.parametrize("rule", ["fp32_master", "bf16_stochastic", "bf16_kahan"])
def test_losses_in_bf16_are_as_exact_as_those_of_transformers(
    in_bf16: list[tuple[Drawn, Distance, Distance]], rule: str
) -> None:
    """Over all runs of a rule: of a single loss, chance decides which rounding is the smaller."""
    of_rule = [actual for actual in in_bf16 if actual[0].resolved.config.precision.update == rule]
    mine = root_mean_square([loss for _, own, _ in of_rule for loss in own.losses])
    theirs = root_mean_square([loss for _, _, other in of_rule for loss in other.losses])
    assert mine <= WORSE * theirs, [run.reproduce for run, _, _ in of_rule]


def worse(errors: Errors) -> dict[str, tuple[float, float]]:
    """Kinds of tensors whose errors exceed those of transformers, with both.

    A norm over all tensors would not show a wrong gradient of a bias, a norm, a router or a sink.
    """
    kinds = {}
    for kind, pairs in errors.items():
        mine, theirs = (root_mean_square(of_all) for of_all in zip(*pairs, strict=True))
        if not mine <= 2 * WORSE * theirs:
            kinds[kind] = (mine, theirs)
    return kinds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", [*FAMILIES, *WITH_EXPERTS])
def test_gradients_of_each_kind_of_tensor_are_as_exact_as_those_of_transformers(
    backend: Backend, family: str, dtype: torch.dtype
) -> None:
    errors = errors_of_tensors(backend, family, SEED, DRAWS_EACH, dtype)
    assert worse(errors) == {}


def test_a_gradient_of_a_bias_that_lacks_a_tenth_is_seen(backend: Backend) -> None:
    sound = linear._Biased.backward

    def smaller(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        of_x, of_bias = sound(ctx, grad)
        return of_x, of_bias * 0.9

    with patch.object(linear._Biased, "backward", staticmethod(smaller)):
        errors = errors_of_tensors(backend, "qwen2", OWN_SEED, DRAWS_EACH, torch.bfloat16)
    assert worse(errors).keys() == {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"}
