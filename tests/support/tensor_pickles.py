"""Pickles that carry tensors as bytes.

`torch.multiprocessing` carries each tensor as a file descriptor, over a connection of its own to a thread of the
sender. For the hundreds of small tensors that tests send to ranks, that takes a tenth of the lane's processor time.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor


class _Pickler(ForkingPickler):
    """Pickler that writes a plain tensor as the bytes of its elements, in row-major order."""

    def reducer_override(self, x: Any) -> Any:
        """Function and arguments that make the object again; tensors alone have others than usual."""
        if type(x) is not Tensor or x.device.type != "cpu" or x.layout is not torch.strided or not x.is_leaf:
            return NotImplemented
        elements = x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        bytes_ = bytearray(elements.view(torch.uint8).numpy())
        return _tensor, (bytes_, x.dtype, x.shape, x.requires_grad)


def _tensor(elements: bytearray, dtype: torch.dtype, shape: torch.Size, requires_grad: bool) -> Tensor:
    flat = torch.frombuffer(elements, dtype=dtype) if elements else torch.empty(0, dtype=dtype)
    return flat.view(shape).requires_grad_(requires_grad)


def dumps(message: object) -> bytes:
    """Bytes of a message, for `pickle.loads` of another process.

    Args:
        message: Anything that pickles; on the other side no two of its tensors share memory.
    """
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(message)
    return file.getvalue()
