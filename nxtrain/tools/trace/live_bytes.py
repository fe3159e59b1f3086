"""Bytes of the tensors that exist while code runs, counted operation by operation."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages of all tensors that operations return in this context.

    A storage counts once, whatever views show it, from the operation that returns it until it is freed. Full sharding
    frees and restores parameters by resizing their storage, which is not an operation; so the context watches storages
    too.

    Attributes:
        peak: Most live bytes at the end of an operation.

    Args:
        excluded: Tensors whose storages do not count.
    """

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._seen: dict[int, Any] = {}
        self._excluded = {x.untyped_storage()._cdata for x in excluded}

    def __enter__(self) -> LiveBytes:
        super().__enter__()
        self._resize = resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resize(storage, size)
            if storage._cdata in self._sizes:
                self._count(storage)
            return storage

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *exc_info: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*exc_info)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor):
                self._count(x.untyped_storage())
        self.peak = max(self.peak, self.now)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._excluded:
            return
        if key not in self._seen:
            self._seen[key] = weakref.ref(storage, lambda _: self._freed(key))
        self.now += storage.nbytes() - self._sizes.get(key, 0)
        self._sizes[key] = storage.nbytes()

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._seen[key]
