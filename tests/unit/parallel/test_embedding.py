"""Gradients of the embedding in 16 bits are sums in float32 that are rounded once, for drawn frequencies of tokens."""

from __future__ import annotations

import pytest
import torch

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.parallel.regions import TensorParallel
from tests.support.embedding import wrong_gradients
from tests.support.models import ALONE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_a_row_is_rounded_once(dtype: torch.dtype) -> None:
    parallel = TensorParallel(ALONE, C10dCollectives(1), CpuKernels(), dtype)
    assert wrong_gradients(parallel, lambda host: host, draws=20) == []
