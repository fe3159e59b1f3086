"""Every operation leaves its inputs as they are, in whatever form of memory they come."""

from __future__ import annotations

from random import Random

import pytest
import torch

from nxtrain.backends.base import Kernels
from nxtrain.backends.cpu import CpuKernels
from nxtrain.backends.cuda import CudaKernels
from nxtrain.backends.kernels import FusedKernels, PlainKernels
from tests.support import contract_kernels
from tests.support.contract import Setting, hold

SEED = 0
DRAWS = 60
DTYPES = (torch.float32, torch.bfloat16)
KERNELS = (FusedKernels(), PlainKernels(), CpuKernels(), CudaKernels())


@pytest.mark.parametrize("name", contract_kernels.CASES)
@pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: type(k).__name__)
def test_a_kernel_keeps_what_it_is_given(kernels: Kernels, name: str) -> None:
    rng = Random(f"{SEED} {name}")
    for _ in range(DRAWS):
        hold(contract_kernels.CASES[name](kernels, rng), Setting(rng, rng.choice(DTYPES)))
