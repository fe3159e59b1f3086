"""Stochastic rounding on XLA: the bits of the CPU, in one graph for all steps."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.adamw import rounded
from tests.support.models import random
from tests.support.xla_bodies import rounded as rounded_on_device
from tests.support.xla_engine import run_devices

STEPS = 5


def test_xla_rounds_to_the_bits_of_the_cpu_and_compiles_once(tmp_path: Path) -> None:
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 3.4e38, -3.4e38, 1e-45, 1.0])
    numbers = {"matrix": random(33, 17), "vector": random(7, scale=1e-20), "cube": random(3, 5, 8, scale=1e20)}
    numbers["special"] = special.repeat(5, 1)
    ((actual, compiled),) = run_devices(1, rounded_on_device, numbers, STEPS, folder=tmp_path)
    assert compiled == 1
    for step, tensors in enumerate(actual, start=1):
        for name, tensor in tensors.items():
            wanted = rounded(numbers[name], step, name=name)
            assert torch.equal(tensor.isnan(), wanted.isnan())
            found_bits, wanted_bits = (x.nan_to_num(nan=1.0).view(torch.int16) for x in (tensor, wanted))
            assert torch.equal(found_bits, wanted_bits), (step, name)
    assert not torch.equal(actual[0]["matrix"], actual[1]["matrix"])
