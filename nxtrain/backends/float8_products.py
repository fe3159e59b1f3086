"""Float8 matrix products on a GPU: a trial on the device, and cuBLAS's layout of block scales.

Source: `_scaled_mm` in https://github.com/pytorch/pytorch, aten/src/ATen/native/cuda of torch 2.9;
https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.backends.capability import FLOAT8, version
from nxtrain.common.kernels import Float8Matrix, Kernels

TRIAL_SIZES = (48, 64, 128)
"""Rows of the left and of the right matrix of the trial product, and the size of its inner dimension."""

TRIAL_ERROR = 0.02
"""Largest relative error of the trial product, whose result is rounded to bfloat16."""


def failure(recipe: str, kernels: Kernels, plain: Kernels, device: torch.device, dtype: torch.dtype) -> str:
    """Try a float8 matrix product on a GPU; return the reason why the recipe fails, or an empty string.

    Args:
        recipe: Value of `precision.fp8`.
        kernels, plain: Kernels of the GPU, and kernels that emulate float8 products.
        dtype: Type of the result.
    """
    capability = torch.cuda.get_device_capability(device)
    if capability < FLOAT8[recipe]:
        return f"it needs compute capability {version(FLOAT8[recipe])}, and this GPU has {version(capability)}"
    generator = torch.Generator().manual_seed(0)
    rows, others, inner = TRIAL_SIZES
    a, b = (_drawn(recipe, generator, number, inner, device) for number in (rows, others))
    try:
        actual = kernels.float8_matmul(a, b, dtype).float()
        wanted = plain.float8_matmul(a, b, torch.float32)
        error = float((actual - wanted).norm() / wanted.norm().clamp(min=torch.finfo(torch.float32).tiny))
    except Exception as problem:  # drivers raise errors of their own
        lines = str(problem).strip().splitlines() or [""]
        return f"{type(problem).__name__}: {lines[0]}"[:200]
    if not error <= TRIAL_ERROR:
        return f"its numbers are off by {error:.1%} of the formula's"
    return ""


def _drawn(recipe: str, generator: torch.Generator, rows: int, columns: int, device: torch.device) -> Float8Matrix:
    shape = {"tensorwise": (1, 1), "rowwise": (rows, 1), "mxfp8": (rows, columns // 32)}[recipe]
    exponents = torch.randint(-3, 3, shape, generator=generator)
    values = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    return Float8Matrix(values.to(device), torch.exp2(exponents.float()).to(device))


def tiled_exponents(scales: Tensor) -> Tensor:
    """Convert power-of-two block scales (M, C) float32 to cuBLAS's layout: (M * C,) float8_e8m0fnu, padded.

    The layout stores tiles of 128 rows and 4 columns in sequence. In a tile, 16 adjacent bytes belong to rows r,
    r + 32, r + 64 and r + 96.
    """
    exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
    rows, columns = exponents.shape
    padded = F.pad(exponents, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)
