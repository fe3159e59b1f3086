"""Activations of blocks in host memory from their forward to their backward pass.

Autograd hands over each tensor that it saves, and asks for the tensor again when its backward pass needs it.
Parameters, tables of positions and inputs that all blocks have in common stay on the device.

On a device with memory of its own, copies have streams of their own. The copies of a block run beside the forward pass
of the next block, whose end waits for them. In the backward pass, a block's tensors come back beside the pass of the
block after it. At most two blocks have tensors on the device at once.

Source: `torch.autograd.graph.save_on_cpu`, which also copies parameters, and a tensor once per operation that saves it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    transfers = Transfers()
    for block in cast(CausalLM, model).blocks:
        block.forward = MethodType(_offloaded(block.forward, model, transfers), block)


def _offloaded(forward: Callable[..., Tensor], model: nn.Module, transfers: Transfers) -> Callable[..., Tensor]:
    def run(block: nn.Module, *inputs: Any) -> Tensor:
        _, *common = inputs  # first positions of documents, say, of which kernels know copies on the host
        with saved_on_host(model, transfers, [x for x in common if isinstance(x, Tensor)]):
            return forward(*inputs)

    return run


class Transfers:
    """Streams of the copies between device and host, for all blocks of a model.

    Attributes:
        newest: Tensors of the newest call of a block, as long as they may leave the device.
    """

    def __init__(self) -> None:
        self.newest: SavedTensors | None = None
        self._streams: tuple[torch.Stream, torch.Stream] | None = None

    def streams(self, device: torch.device) -> tuple[torch.Stream, torch.Stream]:
        """Streams to the host and back."""
        if self._streams is None:
            self._streams = torch.Stream(device), torch.Stream(device)
        return self._streams


@dataclass
class _HostCopy:
    """A saved tensor.

    Attributes:
        host: Values in host memory.
        here: The tensor on the device; None while its memory there is free.
    """

    host: Tensor
    here: Tensor | None


class SavedTensors:
    """Tensors that autograd saves of one call of a block.

    Args:
        transfers: Streams for the copies.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._copies: list[_HostCopy] = []
        self._device = torch.device("cpu")
        self._sent: torch.Event | None = None
        self._arrived: torch.Event | None = None
        self._before: Callable[[], SavedTensors | None] = lambda: None

    def add(self, x: Tensor) -> _HostCopy:
        """Begin to copy a tensor to the host."""
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
        """Free the tensors of the call before, for whose copies the device waits."""
        if not self._copies:
            return
        out, _ = self._transfers.streams(self._device)
        self._sent = out.record_event()
        if self._transfers.newest is not None:
            self._transfers.newest.release()
            self._before = weakref.ref(self._transfers.newest)
        self._transfers.newest = self

    def release(self) -> None:
        """Free the memory on the device, after the copies to the host."""
        assert self._sent is not None
        torch.accelerator.current_stream().wait_event(self._sent)
        for copy in self._copies:
            copy.here = None

    def await_return(self) -> None:
        """Let the device wait until all tensors have returned, and begin to return those of the call before."""
        self.begin_return()
        if self._arrived is not None:
            torch.accelerator.current_stream().wait_event(self._arrived)
            self._arrived = None
        before = self._before()
        if before is not None:
            before.begin_return()

    def begin_return(self) -> None:
        """Begin to copy all tensors back to the device, unless they are there or being copied."""
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
    """Save tensors for backward in host memory in this context.

    Parameters and buffers of a module stay where they are, and so do tensors that all its blocks have in common.
    """
    stays = {x.untyped_storage().data_ptr() for x in (*module.buffers(), *common)}
    saved = SavedTensors(transfers)
    # The tensor stays alive with its copy, so that nothing else gets its memory and its key.
    copies: dict[object, tuple[Tensor, _HostCopy]] = {}

    def pack(x: Tensor) -> Tensor | tuple[_HostCopy, torch.Size]:
        is_parameter = isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)
        if is_parameter or x.untyped_storage().data_ptr() in stays:
            return x
        key = _key(x)
        if key not in copies:
            copies[key] = x, saved.add(x)
        return copies[key][1], x.shape

    def unpack(packed: Tensor | tuple[_HostCopy, torch.Size]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        copy, shape = packed
        if copy.here is not None and copy.here.device.type == "cpu":
            return copy.host.view(shape)
        saved.await_return()
        assert copy.here is not None
        return copy.here.view(shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    copies.clear()
    saved.end_forward()


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
