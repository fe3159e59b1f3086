"""Activations of blocks in host memory from their forward to their backward pass.

Autograd hands over each tensor that it saves, and asks for the tensor again when its backward pass needs it. A block's
tensors leave the device at the end of its forward pass. Parameters and tables of positions stay on the device.

Source: `torch.autograd.graph.save_on_cpu`, which also copies parameters, and a tensor once per operation that saves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from nxtrain.common.family import CausalLM


def offload_activations(model: nn.Module) -> None:
    """Make the blocks of a model keep what autograd saves of them in host memory.

    Args:
        model: A `CausalLM`, changed in place; blocks that are recomputed keep their inputs only.
    """
    for block in cast(CausalLM, model).blocks:
        block.forward = MethodType(_offloaded(block.forward, model), block)


def _offloaded(forward: Callable[..., Tensor], model: nn.Module) -> Callable[..., Tensor]:
    def run(block: nn.Module, *inputs: Any) -> Tensor:
        with saved_on_host(model):
            return forward(*inputs)

    return run


@contextmanager
def saved_on_host(module: nn.Module) -> Iterator[None]:
    """Save tensors for backward in host memory in this context, other than parameters and buffers of a module."""
    stays = {buffer.untyped_storage().data_ptr() for buffer in module.buffers()}
    # By place: the tensor, kept alive so that nothing else takes its place, and its copy.
    kept: dict[object, tuple[Tensor, Tensor]] = {}

    def pack(x: Tensor) -> tuple[torch.device, Tensor]:
        whole = x._base if x._base is not None else x
        if isinstance(whole, nn.Parameter) or x.untyped_storage().data_ptr() in stays:
            return x.device, x
        place = _place(x)
        if place not in kept:
            kept[place] = x, to_host(x)
        return x.device, kept[place][1].view_as(x) if x.is_contiguous() else kept[place][1]

    def unpack(saved: tuple[torch.device, Tensor]) -> Tensor:
        device, x = saved
        return x.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    kept.clear()


def _place(x: Tensor) -> object:
    """Key of the values of a tensor; contiguous views of the same values share one."""
    order = x.numel() if x.is_contiguous() else (x.shape, x.stride())
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.dtype, x._version, order


def to_host(x: Tensor) -> Tensor:
    """Copy a tensor to host memory from which the device reads; a tensor of the host is the copy itself."""
    if x.device.type == "cpu":
        return x
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x.detach(), non_blocking=True)
