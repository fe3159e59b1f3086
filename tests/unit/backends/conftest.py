"""Packages that a test leaves where nothing else is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support import leave_metadata

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Leave a package's metadata as pip does, where nothing else is installed."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.delenv("NXD_CPU_MODE", raising=False)
    return partial(leave_metadata, site)
