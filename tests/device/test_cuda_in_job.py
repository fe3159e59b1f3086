"""A GPU's rank is killed and replaced, and the run stays what it was, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_in_job import IN_JOB, Watched

pytestmark = pytest.mark.cuda

HOW = ("backend.name=cuda", "backend.deterministic=true", "checkpoint.async=false")


@pytest.mark.usefixtures("has_two_gpus")
def test_a_rank_of_a_gpu_is_replaced_and_the_other_keeps_its_process(tmp_path: Path) -> None:
    how: dict[str, Any] = {"within_s": 400.0, "ignores": []}  # processes of their own: a fork cannot use a GPU
    golden = Watched(tmp_path / "golden", *HOW, **how).golden
    points = ("2:fwd", "4:bwd", "5:reduce", "8:opt")
    found = Watched(tmp_path / "killed", *HOW, IN_JOB, faults=[f"kill@1:{point}" for point in points], **how)
    found.assert_is(golden)
    assert found.replaced == ["1"] * len(points)
    assert len(found.survivors(2)) == 1
