"""A small language model at a low learning rate learns in bf16 what it learns in fp32, unless updates are lost.

The text is a Markov chain of first order. At this rate most updates are below half the distance between neighbouring
bf16 numbers, so that rounding to nearest leaves most weights where they are.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.family import find_family
from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved
from nxtrain.config.schedule import ScheduleConfig
from nxtrain.config.schema import RunConfig
from nxtrain.optim.schedule import Schedule
from nxtrain.train.build import build_model, build_state
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.step import train_step
from tests.support.adamw import rounding_to_nearest
from tests.support.drawn import one_in

VOCAB, BATCH, SEQ_LEN = 32, 8, 64
STEPS, LAST = 300, 50
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": SEQ_LEN,
}
SCHEDULE = Schedule.of_keys(ScheduleConfig(lr=1e-4, min_lr=1e-5, warmup_steps=20), STEPS)


def text() -> Tensor:
    """(STEPS, BATCH, SEQ_LEN + 1) tokens."""
    generator = torch.Generator().manual_seed(5)
    transitions = torch.softmax(2.0 * torch.randn(VOCAB, VOCAB, generator=generator), dim=-1)
    tokens = [torch.randint(VOCAB, (STEPS * BATCH,), generator=generator)]
    for _ in range(SEQ_LEN):
        tokens.append(torch.multinomial(transitions[tokens[-1]], 1, generator=generator).squeeze(1))
    return torch.stack(tokens, dim=1).view(STEPS, BATCH, SEQ_LEN + 1)


def final_loss(tokens: Tensor, update: str) -> float:
    """Mean loss of the last steps."""
    params = "fp32" if update == "fp32" else "bf16"
    tables = {
        "train": {"seq_len": SEQ_LEN, "global_batch": BATCH, "micro_batch": BATCH},
        "precision": {"params": params, "update": update},
    }
    family = find_family("llama")
    plan = Resolved(RunConfig.model_validate(tables), family, family.config_type.model_validate(SHAPE))
    backend, mesh = CpuBackend(), Mesh.build(1, 0)
    state = build_state(plan, build_model(plan, backend, mesh, init="draw"), backend, mesh)
    losses = []
    for step, batch in enumerate(tokens, start=1):
        result = train_step(state, DeviceBatch([batch[:, :-1]], [batch[:, 1:]]), SCHEDULE.at(step))
        losses.append(result.loss)
    return torch.stack(losses[-LAST:]).mean().item()


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return text()


@pytest.fixture(scope="module")
def exact(tokens: Tensor) -> float:
    return final_loss(tokens, "fp32")


@pytest.mark.timeout(900)  # twice 300 steps: half a minute alone, several minutes on a machine that has other work
@pytest.mark.parametrize("update", one_in(2, ["bf16_stochastic", "bf16_kahan"]))
def test_bf16_rules_learn_what_fp32_learns(tokens: Tensor, exact: float, update: str) -> None:
    assert abs(final_loss(tokens, update) - exact) <= 0.005


@pytest.mark.timeout(900)
def test_rounding_to_nearest_learns_less(tokens: Tensor, exact: float) -> None:
    with rounding_to_nearest():
        assert final_loss(tokens, "bf16_stochastic") - exact >= 0.1
