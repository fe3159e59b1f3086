"""Gradients of the embedding on XLA are sums in float32 that are rounded once, as on CPUs."""

from __future__ import annotations

from pathlib import Path

from tests.support.embedding import wrong_on_device
from tests.support.xla_engine import run_devices


def test_the_gradient_of_a_row_is_rounded_once(tmp_path: Path) -> None:
    assert run_devices(1, wrong_on_device, 6, folder=tmp_path) == [[]]
