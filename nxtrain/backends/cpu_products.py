"""Instructions of this CPU for matrix products of 16-bit types.

Without them, torch multiplies such types entry by entry, at a seventh of the speed of float32 (torch 2.9, AVX2).
"""

from __future__ import annotations

import platform
from typing import Final

import torch


def has_bf16_products() -> bool:
    """True if oneDNN's products of bfloat16 with float32 sums run on this CPU, by AMX or avx512_bf16."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def has_products(dtype: torch.dtype) -> bool:
    """True if this CPU multiplies matrices of a type at least as fast as their float32 copies."""
    if dtype == torch.bfloat16:
        return _BF16
    return _FP16 if dtype == torch.float16 else True


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


# Constants, since torch.compile cannot trace questions to the CPU.
_BF16: Final = has_bf16_products() or (not _is_x86() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))
_FP16: Final = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
