"""Check of the parameter norm at step 0 against its expected value, to find weights of a wrong scale or shape.

The expected value follows from the initialization. The squares of n entries from N(0, std^2) sum to n std^2 on average,
with a variance of 2 n std^4. Each entry of ones adds 1, and zeros add nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

from nxtrain.backends.torch_kernels import FusedKernels
from nxtrain.common.sharding import ShardSpec
from nxtrain.metrics.run_observer import RunObserver
from nxtrain.parallel.grads import SquareSum
from nxtrain.train.step import TrainState

DEVIATIONS = 6.0
"""Number of standard deviations beyond which a norm is reported; chance exceeds it once in 500 million runs."""

ROUNDED = 1e-3
"""Relative error of the sum of squares that rounding of bf16 parameters and of sums may cause."""


@dataclass(frozen=True)
class ClosedForm:
    """Expected mean and variance of the sum of squares of newly drawn parameters."""

    mean: float
    variance: float

    @staticmethod
    def of(specs: Iterable[ShardSpec]) -> ClosedForm:
        """Expected sum of squares of the given parameters, and its variance; tied copies do not count."""
        mean = variance = 0.0
        for spec in specs:
            if spec.tied_to:
                continue
            entries = math.prod(spec.shape)
            if spec.init.kind == "ones":
                mean += entries
            elif spec.init.kind == "normal":
                mean += entries * spec.init.std**2
                variance += 2 * entries * spec.init.std**4
        return ClosedForm(mean, variance)

    def __add__(self, other: ClosedForm) -> ClosedForm:
        return ClosedForm(self.mean + other.mean, self.variance + other.variance)

    @property
    def norm(self) -> float:
        """Expected parameter norm."""
        return math.sqrt(self.mean)

    @property
    def tolerance(self) -> float:
        """Largest difference of the norm from its expected value that chance and rounding explain."""
        if not self.mean:
            return 0.0
        return (DEVIATIONS * math.sqrt(self.variance) + ROUNDED * self.mean) / (2 * self.norm)

    def explains(self, norm: float) -> bool:
        """True if a norm differs from its expected value by no more than the tolerance."""
        return abs(norm - self.norm) <= self.tolerance


class InitialNorm(RunObserver):
    """Observer that adds the initial and the expected norm to the record of step 1, for a run that drew its weights."""

    def __init__(self, norm: float, expected: ClosedForm) -> None:
        self._values: Mapping[str, float] = {"param_norm_0": norm, "param_norm_expected": expected.norm}

    def measure(self, step: int) -> Mapping[str, float]:
        return self._values if step == 1 else {}


def closed_form(state: TrainState) -> ClosedForm:
    """Expected sum of squares of the whole model, summed over stages and experts; every rank calls this."""
    mesh = state.mesh
    stage, expert_rank = mesh.pp.rank, mesh.ep.rank
    dense = [spec for spec in state.table.values() if not spec.expert]
    experts = [spec for spec in state.table.values() if spec.expert]
    mine = [((stage, -1), ClosedForm.of(dense)), ((stage, expert_rank), ClosedForm.of(experts))]
    parts = dict(chain(*state.ranks.gather(mine)))
    return sum((parts[part] for part in sorted(parts)), ClosedForm(0.0, 0.0))


def measure_initial_norm(state: TrainState) -> tuple[InitialNorm, str]:
    """Measure the norm of drawn weights; return an observer for the record, and a message. Every rank calls this."""
    expected = closed_form(state)
    if state.backend.collectives.lazy:
        norm = _norm_on_host(state)
    else:
        norm = state.backend.fetch({"norm": state.gradients.norm(state.data_parallel.shards)})["norm"]
    line = (
        f"parameter norm {norm:.6g} at step 0; the initialization has {expected.norm:.6g} +- {expected.tolerance:.2g}"
    )
    if not expected.explains(norm):
        line = f"WARNING: {line}: weights have another scale or shape than their layers ask for"
    return InitialNorm(norm, expected), line


def _norm_on_host(state: TrainState) -> float:
    """Parameter norm summed on the hosts; on a lazy device it would be one more graph, with a collective."""
    shards = {name: shard.detach().cpu() for name, shard in state.data_parallel.shards.items()}
    square_sum = SquareSum(state.layout, shards, lambda weights: weights, FusedKernels())
    sums = dict(state.ranks.gather((state.mesh.rank, float(square_sum.of(shards)))))
    return math.sqrt(sum(sums[rank] for rank in state.mesh.state.group_of(state.mesh.rank)))
