"""Division of masked attention into tiles that flash kernels compute without a mask.

A tile is a range of adjacent queries and a range of adjacent keys. In a full tile every query attends to all keys. In
a causal tile each query attends to one key more than the query before, and the last query attends to the last key. A
window hides keys that are too far before the diagonal. Each query is in at most one tile, so outputs of tiles are not
summed.

Positions are ascending and may have gaps: several pieces of a sequence on one rank may share a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nxtrain.common.kernels import Pieces

Positions = NDArray[np.int64]


class Tile(NamedTuple):
    """Tile of attention scores: a range of adjacent queries and a range of adjacent keys.

    Args:
        start, end: First query, and the query after the last.
        low, high: First key, and the key after the last.
        causal: Mask keys after the diagonal, which ends in the last query and the last key; False for no mask.
        window: Most keys between the diagonal and a visible key; None for no limit.
    """

    start: int
    end: int
    low: int
    high: int
    causal: bool
    window: int | None = None


class MaskKind(NamedTuple):
    """Mask of one flash kernel call, the same for all tiles of the call."""

    causal: bool
    window: int | None


def tiles(first: Positions, last: Positions, keys: Positions, *, slides: bool = False) -> list[Tile]:
    """Divide the queries of a sequence into tiles; queries without a visible key are in no tile.

    Args:
        first, last: (Q,) first and last visible position of each query, both ascending.
        keys: (K,) positions of the keys, ascending.
        slides: The attention has a sliding window, so a later query of a tile may not see its first keys.
    """
    low, high = np.searchsorted(keys, first), np.searchsorted(keys, last, side="right")
    seeing = np.flatnonzero(high > low)
    if not len(seeing):
        return []
    rises, falls = np.diff(high), np.diff(low)
    sees = high > low
    joins = sees[1:] & sees[:-1] & (rises >= 0) & (rises <= 1) & (falls >= 0) & (falls <= int(slides))
    kinds = np.where(joins, rises + 2 * falls, -1)
    changes = np.append(np.flatnonzero(np.diff(kinds)), len(kinds) - 1)
    grows = bool((rises == 1).any())  # queries alone in a tile suit either kind, and take that of the others
    results, start = [], int(seeing[0])
    while start < len(last):
        end, causal = start, grows
        if start < len(kinds) and kinds[start] >= 0:
            causal = bool(kinds[start] % 2)
            end = _last_pair(changes, start) + 1
            # From here on the window may move as well, which it does up to the end of the tile.
            if end < len(kinds) and falls[start] == 0 and kinds[end] == kinds[start] + 2:
                end = _last_pair(changes, end) + 1
        window = None
        if low[end] > low[start]:
            window = int(high[end] - 1 - low[end])
        results.append(Tile(start, end + 1, int(low[start]), int(high[end]), causal, window))
        following = int(np.searchsorted(seeing, end + 1))
        if following == len(seeing):
            break
        start = int(seeing[following])
    return results


def _last_pair(changes: NDArray[np.intp], pair: int) -> int:
    """Return the last index of the run of equal kinds that contains a pair of neighbouring queries.

    The kind of a pair tells if the two queries can share a tile, and with which mask.
    """
    return int(changes[np.searchsorted(changes, pair)])


def group_into_calls(by_sequence: Sequence[Sequence[Tile]]) -> list[tuple[MaskKind, list[tuple[int, Tile]]]]:
    """Group the tiles of several sequences into flash kernel calls in which no two tiles share a key.

    Each key gets its gradient from one tile of a call, so the gradients do not depend on the order on the device. The
    order of the calls is fixed.

    Returns:
        Mask of each call, and its tiles with their sequence indices.
    """
    calls: dict[tuple[MaskKind, int], list[tuple[int, Tile]]] = {}
    for sequence, own in enumerate(by_sequence):
        ends: dict[MaskKind, list[int]] = {}
        for tile in own:
            mask = MaskKind(tile.causal, tile.window)
            highs = ends.setdefault(mask, [])
            free = [number for number, high in enumerate(highs) if high <= tile.low]
            number = free[0] if free else len(highs)
            highs[number : number + 1] = [tile.high]
            calls.setdefault((mask, number), []).append((sequence, tile))
    return [(mask, members) for (mask, _), members in calls.items()]


@lru_cache(maxsize=1024)
def undivided_tiles(queries: Pieces, keys: Pieces, window: int | None) -> tuple[Tile, ...]:
    """Return the tiles of a sequence that is one document."""
    last = listed(queries)
    return tuple(tiles(first_seen(np.zeros_like(last), last, window), last, listed(keys), slides=window is not None))


def first_seen(starts: Positions, last: Positions, window: int | None) -> Positions:
    """Return the first visible position of each query, (Q,) or (B, Q), from the first position of its document."""
    if window is None:
        return starts
    return np.maximum(starts, last - (window - 1))


def listed(pieces: Pieces) -> Positions:
    """Concatenate the positions of pieces of a sequence into one array."""
    return np.concatenate([np.arange(piece.start, piece.stop, piece.step) for piece in pieces])
