"""The memory formula of plans, as it is and with one defect, beside the measured memory of real ranks."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

from nxtrain.common.machines import MACHINES
from nxtrain.config.check import Resolved
from nxtrain.plan import memory
from nxtrain.tools.trace.fake_rank import Traced

MODULES = ("shapes", "adapters", "job", "activations", "moments", "memory")
"""Modules of the formula, each after those that it imports."""

TOLERANCE = 0.1
"""Largest share by which a predicted total may differ from the measured one."""

QUANTIZED = 1e-3
"""The same of frozen parameters in NF4, of which a plan counts groups of scales that may not be full."""


@dataclass(frozen=True)
class Defect:
    """A small change of the formula.

    Args:
        name: Mistake that the change stands for.
        module: Module of the formula.
        before, after: Text that the module has once, and the text in its place.
    """

    name: str
    module: str
    before: str
    after: str


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

    def errors(self, formula: ModuleType = memory) -> list[str]:
        """Differences of a formula: of state by a byte, of a total beyond the tolerance."""
        job = job_of(self.resolved, formula)
        return [error for stage, rank in enumerate(self.ranks) for error in _errors(formula, job, stage, rank)]


def job_of(resolved: Resolved, formula: ModuleType = memory) -> Any:
    """A run as a formula sees it."""
    return formula.Job(resolved.family.decoder(resolved.model), MACHINES["p5.48xlarge"], 1, resolved.config)


def _errors(formula: ModuleType, job: Any, stage: int, rank: Traced) -> list[str]:
    predicted = formula.stage_bytes(job, stage)
    bounds = {"params": 0.0, "frozen": QUANTIZED, "optimizer": 0.0, "total": TOLERANCE}
    pairs = {kind: (getattr(predicted, kind), getattr(rank, kind)) for kind in bounds}
    return [
        f"stage {stage}, {kind}: {ours:,} predicted, {theirs:,} measured"
        for kind, (ours, theirs) in pairs.items()
        if ours != pytest.approx(theirs, rel=bounds[kind], abs=0)
    ]


def with_defect(defect: Defect) -> ModuleType:
    """Module `memory` of a copy of the formula that has a defect; no other code sees the copy."""
    names = [f"nxtrain.plan.{each}" for each in MODULES]
    own = {name: sys.modules[name] for name in names}
    try:
        for name in names:
            copy = sys.modules[name] = ModuleType(name)
            has_defect = name == f"nxtrain.plan.{defect.module}"
            exec(_code(own[name], defect) if has_defect else _code(own[name]), copy.__dict__)
        return sys.modules[names[-1]]
    finally:
        sys.modules.update(own)


@cache
def _code(module: ModuleType, defect: Defect | None = None) -> CodeType:
    path = Path(str(module.__file__))
    source = path.read_text(encoding="utf-8")
    if defect is not None:
        assert source.count(defect.before) == 1, f"{path.name} must have once: {defect.before}"
        source = source.replace(defect.before, defect.after)
    return compile(source, str(path), "exec")
