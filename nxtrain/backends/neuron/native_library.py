"""NKI Library attention kernels on TorchNeuron: attention with key bounds, and ring attention.

The kernels are registered as torch operations, so each is one node in a graph of `torch.compile`. A run tries the
kernels on the device before it uses them, since these calls have not been tested on Trainium.

Source: torch/guides/how-to-work-with-nki.html of https://awsdocs-neuron.readthedocs-hosted.com/en/latest, of Neuron
SDK 2.33 (`nki_op`); `wrap_nki` is in the betas before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch

from nxtrain.backends.flash_ranges import trial
from nxtrain.backends.neuron.bounded import BoundedKernels, launches
from nxtrain.backends.neuron.ring_kernels import RingKernels, ring_launches
from nxtrain.backends.ranged_attention import whole_rows
from nxtrain.common.mesh import Axis

TRIAL_TOKENS = 512
"""Sequence length of a kernel trial: one tile of the kernels."""

Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def load_bounded(lnc: int) -> BoundedKernels:
    """Import the attention kernels with key bounds per query.

    Raises:
        ImportError: The kernels cannot be imported.
    """
    from nkilib.core.attention.attention_bwd import attention_bwd
    from nkilib.core.attention.attention_cte import attention_cte

    forward, backward = launches(_wrapped(attention_cte), _wrapped(attention_bwd))
    return BoundedKernels(_registered(forward), _registered(backward), lnc, together=True)


@cache
def load_ring(axis: Axis, lnc: int, *, is_striped: bool) -> RingKernels:
    """Import the ring attention kernels, in which context parallel ranks pass keys and values on.

    Raises:
        ImportError: The kernels cannot be imported.
    """
    from nkilib.experimental.attention.ring_attention_bwd import ring_attention_spmd_bwd
    from nkilib.experimental.attention.ring_attention_fwd import ring_attention_spmd_fwd

    kernels = _wrapped(ring_attention_spmd_fwd), _wrapped(ring_attention_spmd_bwd)
    forward, backward = ring_launches(*kernels, tuple(map(tuple, axis.groups)), lnc, is_striped=is_striped)
    return RingKernels(_registered(forward), _registered(backward))


def bounded_failure(kernels: BoundedKernels, device: torch.device, head_size: int) -> str:
    """Try attention with documents and a window on the device; return why the kernels fail, or an empty string."""
    generator, length = torch.Generator().manual_seed(0), TRIAL_TOKENS
    shapes = [(length, 2, heads, head_size) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for shape in shapes)
    starts = torch.arange(length).div(100, rounding_mode="floor").mul(100)
    of_rows = torch.stack([starts, torch.zeros_like(starts)]).to(device)
    tries = [((q, k, v), whole_rows(q, of_rows)), ((q, k, v), whole_rows(q, None, length // 4))]
    return trial(kernels, tries)


def _wrapped(kernel: Any) -> Any:
    import torch_neuronx

    return getattr(torch_neuronx, "wrap_nki", lambda same: same)(kernel)


def _registered(function: Function) -> Function:
    from torch_neuronx import nki_op

    return cast(Function, nki_op(f"nxtrain::{function.__name__}", mutates_args={})(function))
