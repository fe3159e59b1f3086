"""Division of an attention to ranges of keys into tiles that flash kernels compute without a mask.

A tile is a run of queries and a run of keys. The kernel's diagonal ends in the last query and the last key: either
every query sees all keys of the tile, or each query sees one key more than the query before. A window hides keys that
are too far before the diagonal. Each query is in one tile at most, so that tiles need no sum of outputs.

Positions are ascending, and gaps between them do no harm: a rank's pieces of a row may share a tile.
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
    """Adjacent queries and adjacent keys.

    Args:
        start, end: First query, and the query after the last.
        low, high: First key, and the key after the last.
        causal: The last query sees the last key, and each query one key fewer than the next; False: all see the last.
        window: Most keys between the diagonal and a key that a query sees; None: no limit.
    """

    start: int
    end: int
    low: int
    high: int
    causal: bool
    window: int | None = None


class MaskKind(NamedTuple):
    """Mask of a call of a flash kernel, the same for all tiles of the call."""

    causal: bool
    window: int | None


def tiles(first: Positions, last: Positions, keys: Positions, *, slides: bool = False) -> list[Tile]:
    """Divide the queries of a sequence into tiles; queries that see no key are in none.

    Args:
        first, last: (Q,) first and last position that each query sees, both ascending.
        keys: (K,) positions of the keys, ascending.
        slides: A window moves with the queries, so that a tile may leave keys behind.
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
    """End of the run of equal differences that begins at a pair of neighbouring queries: number of its last pair."""
    return int(changes[np.searchsorted(changes, pair)])


def waves(by_sequence: Sequence[Sequence[Tile]]) -> list[tuple[MaskKind, list[tuple[int, Tile]]]]:
    """Group the tiles of sequences into calls, in a fixed order; within a call no two tiles have a key in common.

    The gradients of a call's keys are then sums of one part each, whatever the order on the device.

    Returns:
        Settings of each call, and the numbers of the sequences with their tiles.
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
    """Tiles of a sequence that is one document."""
    last = listed(queries)
    return tuple(tiles(first_seen(np.zeros_like(last), last, window), last, listed(keys), slides=window is not None))


def first_seen(starts: Positions, last: Positions, window: int | None) -> Positions:
    """First positions that queries see, from those of their documents: (Q,), or (B, Q) for several rows."""
    if window is None:
        return starts
    return np.maximum(starts, last - (window - 1))


def listed(pieces: Pieces) -> Positions:
    """Array of all positions of some pieces."""
    return np.concatenate([np.arange(piece.start, piece.stop, piece.step) for piece in pieces])
