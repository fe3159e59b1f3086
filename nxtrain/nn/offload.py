"""Offloading of activations to host memory, from the forward pass of a block to its backward pass.

Autograd hooks get each saved tensor, and return it when the backward pass needs it. Parameters, position tables and
inputs shared by all blocks stay on the device.

On a device with its own memory, copies run on separate streams. The copies of a block overlap with the forward pass of
the next block, which waits for them at its end. In the backward pass, the copies back overlap with the backward pass of
the following block. At most two blocks have tensors on the device at once.

Source: `torch.autograd.graph.save_on_cpu`, which also copies parameters, and a tensor once per operation that saves it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn

from nxtrain.common.family import CausalLM


def offload_activations(model: nn.Module) -> None:
    """Offload the activations that autograd saves in the blocks of a model to host memory.

    Args:
        model: A `CausalLM`, changed in place. Blocks with activation checkpointing save only their inputs.
    """
    transfers = Transfers()
    for block in cast(CausalLM, model).blocks:
        block.forward = MethodType(_offloaded(block.forward, model, transfers), block)


def _offloaded(forward: Callable[..., Tensor], model: nn.Module, transfers: Transfers) -> Callable[..., Tensor]:
    def run(block: nn.Module, *inputs: Any) -> Tensor:
        _, *common = inputs  # first positions of documents, say, of which kernels know copies on the host
        stays = [x for x in common if isinstance(x, Tensor)]
        # Layers that postpone the gradients of their weights save detached weights, which are not parameters.
        stays += [x for x in block.parameters() if type(x) is nn.Parameter]
        with saved_on_host(model, transfers, stays):
            return forward(*inputs)

    return run


class Transfers:
    """Copy streams between device and host memory, shared by all blocks of a model.

    Attributes:
        newest: Saved tensors of the newest block call, until they are freed on the device.
    """

    def __init__(self) -> None:
        self.newest: SavedTensors | None = None
        self._streams: tuple[torch.Stream, torch.Stream] | None = None

    def streams(self, device: torch.device) -> tuple[torch.Stream, torch.Stream]:
        """Stream for copies to the host, and stream for copies back."""
        if self._streams is None:
            self._streams = torch.Stream(device), torch.Stream(device)
        return self._streams


@dataclass
class _HostCopy:
    """A saved tensor with its copy in host memory.

    Attributes:
        host: Copy in host memory.
        here: Tensor on the device; None while its device memory is freed.
    """

    host: Tensor
    here: Tensor | None


class SavedTensors:
    """Tensors that autograd saves in one call of a block.

    Args:
        transfers: Copy streams of the model.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._copies: list[_HostCopy] = []
        self._device = torch.device("cpu")
        self._sent: torch.Event | None = None
        self._arrived: torch.Event | None = None
        self._before: Callable[[], SavedTensors | None] = lambda: None

    def add(self, x: Tensor) -> _HostCopy:
        """Start to copy a saved tensor to the host."""
        # An operation's own result would keep the operation, and the operation its result.
        here = x.detach()
        if here.device.type == "cpu":
            return _HostCopy(to_host(here), here)
        if torch.empty_like(here, device="meta").stride() != here.stride():
            # A slice would go through memory that the device cannot read, with the host waiting.
            here = here.clone()
        self._device = here.device
        out, _ = self._transfers.streams(here.device)
        out.wait_stream(torch.accelerator.current_stream())
        with out:
            copy = _HostCopy(to_host(here), here)
        self._copies.append(copy)
        return copy

    def end_forward(self) -> None:
        """Let the device wait for the host copies of the previous block call, and free its device tensors."""
        if not self._copies:
            return
        out, _ = self._transfers.streams(self._device)
        self._sent = out.record_event()
        if self._transfers.newest is not None:
            self._transfers.newest.release()
            self._before = weakref.ref(self._transfers.newest)
        self._transfers.newest = self

    def release(self) -> None:
        """Free the device memory of the tensors, after their copies to the host."""
        assert self._sent is not None
        torch.accelerator.current_stream().wait_event(self._sent)
        for copy in self._copies:
            copy.here = None

    def await_return(self) -> None:
        """Let the device wait until all tensors are copied back, and start to copy back those of the previous call."""
        self.begin_return()
        if self._arrived is not None:
            torch.accelerator.current_stream().wait_event(self._arrived)
            self._arrived = None
        before = self._before()
        if before is not None:
            before.begin_return()

    def begin_return(self) -> None:
        """Start to copy all tensors back to the device, unless they are there or being copied."""
        if self._transfers.newest is self:
            self._transfers.newest = None
        away = [copy for copy in self._copies if copy.here is None]
        # From here on autograd alone holds a copy, whose memory is thus free after the last use.
        self._copies.clear()
        if not away:
            return
        # Memory of the stream that computes: what the stream frees, it can use again at once.
        arriving = [torch.empty_like(copy.host, device=self._device) for copy in away]
        _, back = self._transfers.streams(self._device)
        back.wait_stream(torch.accelerator.current_stream())
        with back:
            for copy, here in zip(away, arriving, strict=True):
                copy.here = here.copy_(copy.host, non_blocking=True)
        self._arrived = back.record_event()


@contextmanager
def saved_on_host(module: nn.Module, transfers: Transfers, common: Iterable[Tensor] = ()) -> Iterator[None]:
    """Context in which tensors that autograd saves are kept in host memory.

    Parameters, buffers of a module, and tensors with the memory of those in `common`, stay where they are.
    """
    stays = {x.untyped_storage().data_ptr() for x in (*module.buffers(), *common)}
    saved = SavedTensors(transfers)
    # The tensor stays alive with its copy, so that nothing else gets its memory and its key.
    copies: dict[object, tuple[Tensor, _HostCopy]] = {}

    def pack(x: Tensor) -> Tensor | tuple[_HostCopy, torch.Size, tuple[int, ...]]:
        is_parameter = isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)
        if is_parameter or x.untyped_storage().data_ptr() in stays:
            return x
        key = _key(x)
        if key not in copies:
            copies[key] = x, saved.add(x)
        return copies[key][1], x.shape, x.stride()

    def unpack(packed: Tensor | tuple[_HostCopy, torch.Size, tuple[int, ...]]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        copy, shape, strides = packed
        if copy.here is not None and copy.here.device.type == "cpu":
            return copy.host.view(shape)
        saved.await_return()
        assert copy.here is not None
        here = copy.here.view(shape)
        if here.stride() != strides:  # the backward pass of a compiled function refuses other strides than it saved
            here = with_strides(here, strides)
        return here

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    copies.clear()
    saved.end_forward()


def with_strides(x: Tensor, strides: Sequence[int]) -> Tensor:
    """Copy a tensor into memory with given strides.

    Args:
        x: Tensor whose entries are equal along each dimension of stride 0; they share memory in the copy.
        strides: Strides of the copy.
    """
    once = x
    for dim, stride in enumerate(strides):
        if stride == 0 and x.numel():
            once = once.narrow(dim, 0, 1)
    copy = torch.empty_strided(once.shape, strides, dtype=x.dtype, device=x.device)
    return copy.copy_(once).expand(x.shape)


def _key(x: Tensor) -> object:
    """Key that identifies the values of a tensor; contiguous views of the same values have the same key."""
    order: object = (x.shape, x.stride())
    if x.is_contiguous():
        order = x.numel()
    return x.untyped_storage().data_ptr(), x.storage_offset(), x.dtype, x._version, order


def to_host(x: Tensor) -> Tensor:
    """Copy a tensor to pinned host memory; a tensor in host memory is returned as its own copy."""
    if x.device.type == "cpu":
        return x
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x.detach(), non_blocking=True)
