"""NVIDIA GPUs, opened once per module."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from nxtrain.backends import open_backend
from nxtrain.backends.base import Backend
from tests.support.ranks import RankPool


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    """The first GPU, alone in its world."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            patch.delenv(name, raising=False)
        opened = open_backend("cuda")
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def has_two_gpus() -> None:
    """Skip on a machine with one GPU: NCCL refuses two ranks that share a GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs; this machine shows {torch.cuda.device_count()}")


@pytest.fixture(scope="module")
def has_80_gb() -> None:
    """Skip on a smaller GPU: the recipe of 1B, and its peers with whole logits, are for GPUs of 80 GB."""
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    if total_bytes < 75e9:
        pytest.skip(f"needs a GPU of 80 GB; this one has {total_bytes / 1e9:.0f}")


@pytest.fixture(scope="module")
def two_gpus(has_two_gpus: None) -> Iterator[RankPool]:
    """Two ranks over NCCL, each with a GPU of its own."""
    pool = RankPool("cuda")
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Processes whose torch-xla calls gloo."""
    with closing(RankPool()) as opened:
        yield opened


@pytest.fixture(scope="module")
def example() -> Path:
    """The example's model of NeuronX Distributed, which no package contains."""
    if "NXD_EXAMPLE" not in os.environ:
        pytest.skip("set NXD_EXAMPLE to a path of modeling_llama_nxd.py, which NeuronX Distributed's examples have")
    return Path(os.environ["NXD_EXAMPLE"])
