"""Kernels of torch's `scaled_dot_product_attention` on a GPU: a trial of each, and an order that no release changes.

torch prefers another kernel from release to release, and with it speed and bits change. So a run tries the kernels on
its device, and pins the first that computes the formula. The order counts for the process, not for a block of code, so
that `torch.compile` meets no context in a graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
"""torch's name of each kernel; releases 3 and 4 of FlashAttention replace the one that torch has."""

PACKAGES = {"flash3": ("FA3", "flash-attn-3"), "flash4": ("FA4", "flash-attn-4")}
"""Name in torch's registry, and package, of each kernel that is not a part of torch."""

CUDNN_CAPABILITY = (9, 0)
"""Compute capability from which cuDNN's kernel is tried first, as torchtitan does."""

TRIAL_TOKENS = 256
TRIAL_ERROR = 0.05
"""Largest relative error of a trial: twelve times the rounding of bf16, and far below that of a wrong mask."""


def order(capability: tuple[int, int], *, deterministic: bool = False) -> tuple[GpuKernel, ...]:
    """Kernels in the order in which `auto` tries them; all take 16-bit numbers, the last one float32 too.

    torch knows no order of the sums in cuDNN's gradients, and keeps cuDNN out of deterministic runs.
    """
    if capability >= CUDNN_CAPABILITY and not deterministic:
        return "cudnn", "flash", "efficient"
    return "flash", "efficient"


@contextmanager
def pinned(kernel: str) -> Iterator[None]:
    """Prefer a kernel in this process; other kernels compute what the kernel does not take, such as a single query.

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
        # The compiler's cache knows functions by their code, which does not name the kernel.
        tag, config = torch.compiler.config.cache_key_tag, torch.compiler.config
        stack.callback(setattr, config, "cache_key_tag", tag)
        config.cache_key_tag = f"{tag}attention={kernel}"
        yield


@contextmanager
def _activated(kernel: str) -> Iterator[None]:
    """Activate another release of FlashAttention in place of torch's own."""
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
    """Try a forward and a backward pass of a kernel alone; return the reason why the kernel fails, or nothing.

    Args:
        kernel: Key of `BACKENDS`; a package of its own is active.
    """
    shapes = [(TRIAL_TOKENS, 1, heads, head_size) for heads in (4, 2, 2)]
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    given = [x.requires_grad_() for x in drawn]
    exact = [x.detach().float().requires_grad_() for x in drawn]
    try:
        with warnings.catch_warnings():  # torch warns of each kernel that it does not take
            warnings.simplefilter("ignore")
            with sdpa_kernel([BACKENDS[kernel]]):
                actual = _passes(given, grouped=dtype != torch.float32)
            with sdpa_kernel([SDPBackend.MATH]):
                wanted = _passes(exact, grouped=False)
            errors = [relative_error(x, y) for x, y in zip(actual, wanted, strict=True)]
            worst = float(torch.stack(errors).max())
    except Exception as error:  # drivers raise errors of their own
        return first_line(error)
    return wrong_numbers(worst)


def first_line(error: Exception) -> str:
    """Kind and first line of an error."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:200]


def wrong_numbers(worst: float) -> str:
    """Reason why a kernel with this relative error is refused: too large, or NaN; empty for a right kernel."""
    if worst <= TRIAL_ERROR:
        return ""
    return f"its numbers are off by {worst:.1%} of the formula's"


def _passes(qkv: list[Tensor], *, grouped: bool) -> list[Tensor]:
    """Output and gradients of one causal attention."""
    out = sdpa(qkv[0], qkv[1], qkv[2], grouped=grouped)
    return [out, *torch.autograd.grad(out, qkv, out.detach())]


def relative_error(actual: Tensor, wanted: Tensor) -> Tensor:
    """Norm of the difference over the norm of the wanted tensor, () float32; 0 where both are zeros."""
    difference = F.mse_loss(actual.float(), wanted).sqrt()
    return difference / wanted.square().mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
