"""What the modules of this lane share: processes that start at once, and the runs that nothing befell."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext

import pytest

from tests.support.command_ranks import context
from tests.support.recovery import Golden, configure, supervise


@pytest.fixture(scope="session")
def started_by() -> ForkServerContext:
    return context()


@pytest.fixture(scope="session")
def golden(started_by: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """Two data parallel ranks, everything in float32."""
    folder = tmp_path_factory.mktemp("golden")
    configure(folder)
    return Golden.of(supervise(started_by, folder))
