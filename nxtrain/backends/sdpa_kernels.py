"""Trial and choice of the kernel of torch's `scaled_dot_product_attention` on a GPU.

torch's preferred kernel changes between releases, and with it speed and bits. So a run tries the kernels on its GPU in
a fixed order, and pins the first correct kernel. The pin holds for the process, not for a block of code, so
`torch.compile` has no context manager in a graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.compiler.config
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nxtrain.backends.attention_choice import GpuKernel
from nxtrain.backends.torch_attention import sdpa
from nxtrain.common.errors import BackendError

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,
    "flash4": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "plain": SDPBackend.MATH,
}
"""torch's constant of each kernel; FlashAttention 3 and 4 replace torch's own FlashAttention."""

PACKAGES = {"flash3": ("FA3", "flash-attn-3"), "flash4": ("FA4", "flash-attn-4")}
"""Name in torch's registry, and pip package, of each kernel that is not a part of torch."""

CUDNN_CAPABILITY = (9, 0)
"""Lowest compute capability for which cuDNN's kernel is tried first, as in torchtitan."""

TRIAL_TOKENS = 256
TRIAL_ERROR = 0.05
"""Largest relative error of a kernel trial: twelve times bf16 rounding, and far below the error of a wrong mask."""


def order(capability: tuple[int, int], *, deterministic: bool = False) -> tuple[GpuKernel, ...]:
    """Attention kernels in the order in which `auto` tries them on a GPU.

    All support 16-bit types, and the last also float32. torch excludes cuDNN from deterministic runs, since the order
    of sums in its gradients is not fixed.
    """
    if capability >= CUDNN_CAPABILITY and not deterministic:
        return "cudnn", "flash", "efficient"
    return "flash", "efficient"


def takes_groups(kernel: str, dtype: torch.dtype) -> bool:
    """True if a kernel takes several query heads for a key/value head; otherwise key/value heads must be repeated.

    torch's memory-efficient kernel takes no groups, and is the only fused kernel for float32.
    """
    return kernel != "efficient" and dtype != torch.float32


@contextmanager
def pinned(kernel: str) -> Iterator[None]:
    """Make torch prefer an attention kernel in this process; other kernels compute unsupported shapes.

    Raises:
        BackendError: The kernel's package is missing, or this torch cannot activate the kernel.
    """
    backends = [BACKENDS[kernel]]
    with ExitStack() as stack:
        if kernel in PACKAGES:
            stack.enter_context(_activated(kernel))
        for other in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
            if other not in backends:
                backends.append(other)
        stack.enter_context(sdpa_kernel(backends, set_priority=True))
        # The cache of torch.compile identifies functions by their code, which does not contain the kernel.
        tag, config = torch.compiler.config.cache_key_tag, torch.compiler.config
        stack.callback(setattr, config, "cache_key_tag", tag)
        config.cache_key_tag = f"{tag}attention={kernel}"
        yield


@contextmanager
def _activated(kernel: str) -> Iterator[None]:
    """Activate FlashAttention 3 or 4 in place of torch's own FlashAttention."""
    name, package = PACKAGES[kernel]
    attention: Any = torch.nn.attention
    activate = getattr(attention, "activate_flash_attention_impl", None)
    if activate is None:
        raise BackendError(
            f"backend.attention={kernel}: torch {torch.__version__} has no activate_flash_attention_impl; "
            "use torch 2.11 or newer, or backend.attention=auto"
        )
    try:
        activate(name)
    except Exception as error:  # packages raise errors of their own
        raise BackendError(
            f"backend.attention={kernel}: torch cannot activate {name}: {error}; pip install {package}, or use "
            "backend.attention=auto"
        ) from error
    try:
        yield
    finally:
        attention.restore_flash_attention_impl()


def failure(kernel: str, device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """Try an attention kernel forward and backward on a GPU; return the reason for a failure, or an empty string.

    Args:
        kernel: Key of `BACKENDS`; the kernel's own package, if any, must be active.
    """
    if kernel == "cudnn":
        return _failure_of_cudnn(device, dtype, head_size)
    return _trial(kernel, device, dtype, head_size)


@cache
def _failure_of_cudnn(device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """Result of the only trial of cuDNN's kernel in this process.

    After a failure, a second call of the kernel ends the process with torch 2.15.
    """
    return _trial("cudnn", device, dtype, head_size)


def _trial(kernel: str, device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    shapes = [(TRIAL_TOKENS, 1, heads, head_size) for heads in (4, 2, 2)]
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    given = [x.requires_grad_() for x in drawn]
    exact = [x.detach().float().requires_grad_() for x in drawn]
    try:
        with warnings.catch_warnings():  # torch warns about each kernel that it does not use
            warnings.simplefilter("ignore")
            with sdpa_kernel([BACKENDS[kernel]]):
                actual = _passes(given, grouped=takes_groups(kernel, dtype))
            with sdpa_kernel([SDPBackend.MATH]):
                wanted = _passes(exact, grouped=False)
            errors = [relative_error(x, y) for x, y in zip(actual, wanted, strict=True)]
            worst = float(torch.stack(errors).max())
    except Exception as error:  # drivers raise errors of their own
        return first_line(error)
    return wrong_numbers(worst)


def first_line(error: Exception) -> str:
    """Type name and first line of an error, at most 200 characters."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def wrong_numbers(worst: float) -> str:
    """Reason why a kernel with this relative error is refused; empty if the error is within `TRIAL_ERROR`."""
    if worst <= TRIAL_ERROR:
        return ""
    return f"its numbers are off by {worst:.1%} of the formula's"


def _passes(qkv: list[Tensor], *, grouped: bool) -> list[Tensor]:
    """Compute the output and the gradients of causal attention."""
    out = sdpa(qkv[0], qkv[1], qkv[2], grouped=grouped)
    return [out, *torch.autograd.grad(out, qkv, out.detach())]


def relative_error(actual: Tensor, wanted: Tensor) -> Tensor:
    """Norm of the difference divided by the norm of the wanted tensor, () float32; 0 if both tensors are zeros."""
    difference = F.mse_loss(actual.float(), wanted).sqrt()
    return difference / wanted.square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
