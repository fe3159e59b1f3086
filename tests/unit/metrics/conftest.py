"""Time that the tests of this folder move by hand."""

from __future__ import annotations

import pytest


class FakeClock:
    """A clock that stands still until told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()
