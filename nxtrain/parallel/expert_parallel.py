"""Expert parallelism: each rank of an axis computes some experts, for the tokens of all ranks of the axis."""

from __future__ import annotations

from dataclasses import dataclass

from nxtrain.common.distributed.collectives import Collectives
from nxtrain.common.layers import ExpertExchange
from nxtrain.common.mesh import Axis


@dataclass(frozen=True)
class ExpertParallel(ExpertExchange):
    """Exchange of tokens by all-to-all.

    Args:
        axis: Expert parallel axis.
        comm: Collectives.
    """

    axis: Axis
    comm: Collectives
