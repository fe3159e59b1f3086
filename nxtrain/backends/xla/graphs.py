"""The graph that the next step boundary would run, found before it runs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor


def freeze_older_objects() -> None:
    """Spare `pending` the objects that are there already: imports make some 450,000, a third of a second per call.

    Called before the first tensor on the device.
    """
    gc.collect()
    gc.freeze()


def pending(device: torch.device) -> list[Tensor]:
    """The tensors that a step boundary computes: all that live and are not there yet, in the order of their birth.

    torch-xla knows them, but gives only the StableHLO of their graph; for a hash or HLO it asks for the tensors.
    """
    import torch_xla

    xla = torch_xla._XLAC
    gc.collect()  # what a cycle still holds would be computed too
    seen: list[Tensor] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some modules warn when they are asked for their type
        for found in gc.get_objects():
            if issubclass(type(found), Tensor) and found.device == device:
                seen.append(found)
    seen += [tensor.grad for tensor in seen if tensor.is_leaf and tensor.grad is not None]
    seen += [tensor for tensor in _saved(seen) if tensor.device == device]
    alive = {xla._xla_get_tensor_id(tensor): tensor for tensor in seen}
    ordered = [alive[index] for index in sorted(alive)]
    wanted = xla._check_tensor_need_materialization(ordered) if ordered else []
    computed = [tensor for tensor, needed in zip(ordered, wanted, strict=True) if needed]
    number = sum(xla._check_device_tensor_need_materialization(str(device)))
    assert len(computed) == number, f"Python sees {len(computed)} of {number} tensors to compute"
    return computed


def _saved(tensors: list[Tensor]) -> Iterator[Tensor]:
    """What a backward pass that is still to come has kept, some of it out of sight of Python."""
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    met = set(nodes)
    while nodes:
        node = nodes.pop()
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                with suppress(RuntimeError):  # freed, since this part of the pass is over
                    kept = getattr(node, name)
                    yield from (
                        x for x in (kept if isinstance(kept, tuple | list) else (kept,)) if isinstance(x, Tensor)
                    )
        for following, _ in node.next_functions:
            if following is not None and following not in met:
                met.add(following)
                nodes.append(following)


def hash_of(tensors: list[Tensor]) -> str:
    """Hash of the graph that computes some tensors; on all ranks that recorded the same it is the same."""
    import torch_xla

    found: str = torch_xla._XLAC._get_graph_hash(tensors).hex()
    return found
