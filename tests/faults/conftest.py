"""Fixtures of this lane: a fork server with all imports, and the runs without faults."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext
from typing import Any

import pytest

from tests.support import commands
from tests.support.recovery import Golden, configure, supervise
from tests.support.runs import course


@pytest.fixture(scope="session")
def started_by() -> ForkServerContext:
    return commands.context()


@pytest.fixture(scope="session")
def golden(started_by: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """Two data parallel ranks, everything in float32."""
    folder = tmp_path_factory.mktemp("golden")
    configure(folder)
    return Golden.of(supervise(started_by, folder))


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The records of twelve steps of one rank that nothing befell."""
    folder = tmp_path_factory.mktemp("straight")
    commands.write_config(folder, steps=12)
    commands.trained(folder)
    return course(folder / "run")
