"""Hash and tensors of the XLA graph that the next step boundary will run."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import cast

import torch
from torch import Tensor


def freeze_older_objects() -> None:
    """Exclude existing Python objects from the tensor search of `pending`.

    Imports create about 450,000 objects, which cost a third of a second per search. Call this before the first tensor
    is on the device.
    """
    gc.collect()
    gc.freeze()


def pending(device: torch.device) -> list[Tensor]:
    """List the tensors that the next step boundary computes: all live lazy tensors, in the order of creation.

    torch-xla has its own list, but returns only the StableHLO of its graph. The tensors are needed for a hash or HLO.
    """
    import torch_xla

    xla = torch_xla._XLAC
    gc.collect()  # tensors in reference cycles would be computed too
    seen = tensors_on(device, gc.get_objects())
    seen += [tensor.grad for tensor in seen if tensor.is_leaf and tensor.grad is not None]
    seen += [tensor for tensor in _saved(seen) if tensor.device == device]
    alive = {xla._xla_get_tensor_id(tensor): tensor for tensor in seen}
    ordered = [alive[index] for index in sorted(alive)]
    wanted = xla._check_tensor_need_materialization(ordered) if ordered else []
    computed = [tensor for tensor, needed in zip(ordered, wanted, strict=True) if needed]
    number = sum(xla._check_device_tensor_need_materialization(str(device)))
    assert len(computed) == number, f"Python objects hold {len(computed)} of {number} tensors to compute"
    return computed


def tensors_on(device: torch.device, objects: Sequence[object]) -> list[Tensor]:
    """List the tensors of a device among Python objects, without tensors that another thread is freeing."""
    tensors: list[Tensor] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some modules warn when their type is read
        kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, Tensor)}
        for tensor in (cast(Tensor, candidate) for candidate in objects if type(candidate) in kinds):
            try:
                if tensor.device == device:
                    tensors.append(tensor)
            except RuntimeError:  # the collector lists a tensor until its memory is gone; then, there is no device
                continue
    return tensors


def _saved(tensors: list[Tensor]) -> Iterator[Tensor]:
    """Iterate over tensors that autograd saved for backward; no Python object may hold them."""
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    met = set(nodes)
    while nodes:
        node = nodes.pop()
        for name in _saving_names(type(node)):
            try:
                kept = getattr(node, name)
            except RuntimeError:  # freed, since this part of the backward pass is done
                continue
            if isinstance(kept, Tensor):
                yield kept
            elif isinstance(kept, tuple | list):
                yield from (x for x in kept if isinstance(x, Tensor))
        for following, _ in node.next_functions:
            if following is not None and following not in met:
                met.add(following)
                nodes.append(following)


@cache
def _saving_names(node_type: type) -> tuple[str, ...]:
    """Names of the attributes in which autograd nodes of a type keep saved tensors."""
    return tuple(name for name in dir(node_type) if name.startswith("_saved_") or name == "saved_tensors")


def hash_of(tensors: list[Tensor]) -> str:
    """Hash of the graph that computes tensors, equal on all ranks that recorded the same operations."""
    import torch_xla

    digest: str = torch_xla._XLAC._get_graph_hash(tensors).hex()
    return digest
