"""The configurations that ship, and the ranks that each of them asks for."""

from __future__ import annotations

from pathlib import Path

from nxtrain.backends.neuron.hardware import INSTANCES
from nxtrain.config.load import Loaded

CONFIGS = Path(__file__).parents[2] / "configs"


def world_of(loaded: Loaded) -> int:
    """Ranks of a configuration's cluster: one per core of its instances, or as many as its degrees need."""
    cluster, parallel = loaded.config.cluster, loaded.config.parallel
    if cluster.instance:
        return cluster.nodes * INSTANCES[cluster.instance].devices
    return parallel.tp * parallel.pp * max(parallel.dp, 1)
