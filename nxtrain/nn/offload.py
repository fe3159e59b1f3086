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
    # The tensor stays alive with its copy, so that nothing else gets its memory and its key.
    copies: dict[object, tuple[Tensor, Tensor]] = {}

    def pack(x: Tensor) -> tuple[torch.device, Tensor]:
        is_parameter = isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)
        if is_parameter or x.untyped_storage().data_ptr() in stays:
            return x.device, x
        key = _key(x)
        if key not in copies:
            copies[key] = x, to_host(x)
        copy = copies[key][1]
        if x.is_contiguous():
            copy = copy.view_as(x)
        return x.device, copy

    def unpack(saved: tuple[torch.device, Tensor]) -> Tensor:
        device, x = saved
        return x.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    copies.clear()


def _key(x: Tensor) -> object:
    """Key of the values of a tensor; contiguous views of the same values share one."""
    order: object = (x.shape, x.stride())
    if x.is_contiguous():
        order = x.numel()
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.dtype, x._version, order


def to_host(x: Tensor) -> Tensor:
    """Copy a tensor to host memory from which the device reads; a tensor of the host is the copy itself."""
    if x.device.type == "cpu":
        return x
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x.detach(), non_blocking=True)
