"""The memory formula of plans beside the measured memory of real ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from nxtrain.common.machines import MACHINES
from nxtrain.config.check import Resolved
from nxtrain.plan.job import Job
from nxtrain.plan.memory import Bytes, stage_bytes
from nxtrain.tools.trace.fake_rank import Traced

TOLERANCE = 0.1
"""Largest share by which a predicted total may differ from the measured one."""

QUANTIZED = 1e-3
"""The same of frozen parameters in NF4, of which a plan counts groups of scales that may not be full."""

Formula = Callable[[Job, int], Bytes]


@dataclass(frozen=True)
class Measured:
    """A training step of real ranks, whose tensors were counted.

    Args:
        name: Name of the run.
        resolved: Configuration with all degrees.
        ranks: First rank of each pipeline stage, which holds the most rows of its stage.
    """

    name: str
    resolved: Resolved
    ranks: tuple[Traced, ...]

    def errors(self, formula: Formula = stage_bytes) -> list[str]:
        """Differences of a formula: of state by a byte, of a total beyond the tolerance."""
        job = job_of(self.resolved)
        return [error for stage, rank in enumerate(self.ranks) for error in _errors(formula(job, stage), stage, rank)]


def job_of(resolved: Resolved) -> Job:
    """A run as a plan sees it."""
    return Job(resolved.dimensions, MACHINES["p5.48xlarge"], 1, resolved.config)


def _errors(predicted: Bytes, stage: int, rank: Traced) -> list[str]:
    bounds = {"params": 0.0, "frozen": QUANTIZED, "optimizer": 0.0, "total": TOLERANCE}
    pairs = {kind: (getattr(predicted, kind), getattr(rank, kind)) for kind in bounds}
    return [
        f"stage {stage}, {kind}: {ours:,} predicted, {theirs:,} measured"
        for kind, (ours, theirs) in pairs.items()
        if ours != pytest.approx(theirs, rel=bounds[kind], abs=0)
    ]
