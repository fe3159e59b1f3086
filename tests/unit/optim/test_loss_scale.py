"""The loss scale against torch's scaler, and the update of a step that overflows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nxtrain.optim.loss_scale import LossScale
from nxtrain.train.health.step_history import PastStep


@settings(max_examples=200)
@given(
    first=st.sampled_from([2.0**-20, 1.0, 1000.0, 65536.0, 2.0**126]),
    every=st.integers(1, 4),
    overflows=st.lists(st.booleans(), min_size=1, max_size=20),
)
def test_every_step_changes_the_scale_as_torchs_scaler_does(first: float, every: int, overflows: list[bool]) -> None:
    ours = LossScale(lambda x: x, first, every, positions=1)
    scale, steps = torch.tensor(first), torch.tensor(0, dtype=torch.int32)
    for overflowed in overflows:
        ours.update(torch.tensor(overflowed))
        torch._amp_update_scale_(scale, steps, torch.tensor(float(overflowed)), 2.0, 0.5, every)
        assert ours.state[0] == scale
        assert scale.isinf() or scale >= 2.0**126 or ours.state[1] == steps


def test_a_sum_over_positions_is_scaled_as_their_mean() -> None:
    assert LossScale(lambda x: x, 65536.0, 1, positions=64).per_position().item() == 1024


def test_what_a_checkpoint_keeps_restores_the_scale() -> None:
    ours = LossScale(lambda x: x, 8.0, 5, positions=1)
    for overflowed in (True, False, False):
        ours.update(torch.tensor(overflowed))
    kept = ours.kept(lambda values: {name: x.item() for name, x in values.items()}, torch.tensor(2.0))
    assert kept == {"scale": 4.0, "steps": 2.0, "num_updates": 2.0}
    other = LossScale(lambda x: x, 65536.0, 5, positions=1)
    other.restore(kept, lambda x: x)
    assert torch.equal(other.state, ours.state)


@pytest.mark.parametrize(
    ("loss", "norm", "scale", "overflows"),
    [
        (2.0, float("inf"), 32768.0, True),
        (2.0, float("nan"), 1.0, True),
        (2.0, float("inf"), 0.5, False),
        (float("nan"), float("nan"), 32768.0, False),
        (2.0, 1.0, 32768.0, False),
    ],
)
def test_a_step_overflows_if_only_its_scaled_gradient_is_not_finite(
    loss: float, norm: float, scale: float, overflows: bool
) -> None:
    assert PastStep(1, loss, norm).overflows(scale) == overflows
