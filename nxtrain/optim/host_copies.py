"""Host copies of parameters and gradients, for an optimizer whose state is offloaded to host memory.

The device copies all tensors into one host buffer, and the host only waits for the end of these copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from nxtrain.common.io.checksummed_file import aligned_memory


class HostCopies:
    """Copies of a device's parameters and gradients in host memory, for an update on the host.

    Attributes:
        params: Host copies of the parameters, which the update changes.

    Args:
        shards: Parameters on the device, by name.
        pin: Allocator of pinned host memory, `Backend.pin`.
    """

    def __init__(
        self, shards: Mapping[str, Tensor], pin: Callable[[Tensor], Callable[[], None] | None] = lambda memory: None
    ) -> None:
        self._shards, self._pin = shards, pin
        self.params, _ = self._memory(shards)
        self._grads: dict[str, Tensor] = {}
        self._free_grads: Callable[[], object] = _nothing

    def fetch(self, grads: Mapping[str, Tensor], read: Collection[str]) -> dict[str, Tensor]:
        """Copy gradients, and the parameters that the update reads, from the device to the host; wait for the copies.

        Args:
            grads: Gradients on the device, by name of the parameter.
            read: Names of the parameters to copy.

        Returns:
            Host copies of the gradients, valid until the next call.
        """
        types = {name: grad.dtype for name, grad in grads.items()}
        # Sums over several micro-batches may be wider than the gradients of a single micro-batch.
        if types != {name: copy.dtype for name, copy in self._grads.items()}:
            self._free_grads()
            self._grads, self._free_grads = self._memory(grads)
        for name, grad in grads.items():
            self._grads[name].copy_(grad, non_blocking=True)
        for name in read:
            self.params[name].copy_(self._shards[name], non_blocking=True)
        if any(grad.device.type != "cpu" for grad in grads.values()):
            torch.accelerator.current_stream().record_event().synchronize()
        return self._grads

    def send(self) -> None:
        """Start to copy the parameters back to the device; later device work and the next `fetch` wait for them."""
        for name, shard in self._shards.items():
            shard.copy_(self.params[name], non_blocking=True)

    def _memory(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[], object]]:
        """Host tensors like device tensors, in one buffer that the device reads and writes.

        Returns:
            The tensors by name, and a function that ends the device's access to the buffer, before the buffer is freed.
        """
        # Wide types first, so that each begins at a multiple of its size.
        order = sorted(tensors, key=lambda name: -tensors[name].element_size())
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        buffer = torch.frombuffer(aligned_memory(max(1, num_bytes)), dtype=torch.uint8)
        unpin = self._pin(buffer)
        free: Callable[[], object] = _nothing
        if unpin is not None:
            free = weakref.finalize(self, unpin)
        copies: dict[str, Tensor] = {}
        start = 0
        for name in order:
            tensor = tensors[name]
            copies[name] = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            start += tensor.nbytes
        return copies, free


def _nothing() -> None:
    """Do nothing, for memory that is not pinned."""
