"""Attention to ranges of keys by flash kernels: one call per run of queries and keys, and no mask.

The host divides queries and keys into tiles, whose first positions it knows. Rows of one document are given to the
kernel as they lie, for all sequences at once. Of packed documents the rows are gathered, and one call takes the tiles
of all documents by their offsets. The backward pass calls the kernel's own, with the log-sums of all keys, so that the
weights are those of the whole attention: Liu et al. 2023 (arXiv:2310.01889).

Shapes: Q queries, K keys, B batch, N query heads, M key/value heads, H head dimension, T rows of a call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nxtrain.backends.attention_tiles import MaskKind, Tile, first_seen, listed, tiles, undivided_tiles, waves
from nxtrain.backends.ranged_attention import AttentionToRanges, Blocks, whole_rows
from nxtrain.backends.sdpa_kernels import TRIAL_TOKENS, first_line, relative_error, wrong_numbers
from nxtrain.common.kernels import KeyRanges, Pieces

RowIndices = slice | Tensor | None


@dataclass(frozen=True)
class Call:
    """A call of a flash kernel.

    Args:
        queries, keys: Positions of every sequence; or with offsets places in the rows of all sequences, (T,) int64,
            None: all places in order.
        mask: Settings of the kernel.
        offsets: (tiles + 1,) int32 twice, first query and first key of each tile; None: one tile for each sequence.
        longest: Most queries and most keys of a tile.
    """

    queries: RowIndices
    keys: RowIndices
    mask: MaskKind
    offsets: tuple[Tensor, Tensor] | None
    longest: tuple[int, int]


class FlashKernel(ABC):
    """Interface of a flash kernel: (B, T, N, H) queries, (B, T, M, H) keys; with offsets (T, N, H) and (T, M, H).

    The diagonal ends in the last query and the last key of a tile. `log_sums` are (B, N, T) float32; with offsets
    (N, T).
    """

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Output, and logarithms of the softmax's denominators."""

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values; `log_sums` may include further keys that other calls compute."""


class TorchFlash(FlashKernel):
    """FlashAttention of torch on GPUs, or a newer release that was activated in place of torch's.

    Gradients are deterministic with `torch.use_deterministic_algorithms`.

    Source: `torch/nn/attention/varlen.py` of torch 2.10, which calls the same operations.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        settings, sides = _settings(call)
        out, log_sums, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *settings, 0.0, call.mask.causal, False, **sides
        )
        return out, log_sums

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        settings, sides = _settings(call)
        # State of random numbers, which nothing reads without dropout.
        state = torch.empty(2, dtype=torch.uint64, device=q.device)
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, log_sums, *settings, 0.0, call.mask.causal, state, state[:0], **sides
        )
        return grads


def _settings(call: Call) -> tuple[tuple[Tensor | None, Tensor | None, int, int], dict[str, int]]:
    """Offsets and lengths of a call in torch's order, and the sides of its window, of which -1 has no limit."""
    queries, keys = call.offsets or (None, None)
    sides = {}
    if call.mask.window is not None:
        sides = {"window_size_left": call.mask.window, "window_size_right": 0 if call.mask.causal else -1}
    return (queries, keys, *call.longest), sides


@dataclass(frozen=True)
class FlashRanges:
    """`Kernels.attend` and `Kernels.attend_backward` by a flash kernel.

    Args:
        kernel: The kernel.
        copies: Host copies of uploaded tensors, in which first positions of documents are looked up.
    """

    kernel: FlashKernel
    copies: WeakTensorKeyDictionary
    _calls: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def calls(self, ranges: KeyRanges) -> Sequence[Call]:
        """Calls of the kernel for some ranges; those for documents are cached by uploaded tensor and positions."""
        assert ranges.known is not None, "flash kernels need positions on the host"
        if ranges.starts is None:
            return [_whole(tile) for tile in undivided_tiles(*ranges.known, ranges.window)]
        of_upload = self._calls.setdefault(ranges.starts, {})
        key = ranges.known, ranges.window
        if key not in of_upload:
            starts = self.copies.get(ranges.starts)
            if starts is None:  # a tensor made on the device: the host waits, once per tensor
                starts = self.copies[ranges.starts] = ranges.starts.cpu()
            of_upload[key] = _packed(starts.numpy(), *ranges.known, ranges.window, ranges.starts.device)
        return of_upload[key]  # type: ignore[no-any-return]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        """`Kernels.attend`."""
        queries, keys, values = (x.transpose(0, 1) for x in (q, k, v))
        outs, sums = _Rows(q.transpose(0, 1), 0.0), _Rows(q.transpose(0, 1)[..., 0], float("-inf"))
        for call in self.calls(ranges):
            rows = _taken(queries, call.queries), _taken(keys, call.keys), _taken(values, call.keys)
            out, log_sums = self.kernel.forward(*rows, call)
            outs.put(call.queries, out)
            sums.put(call.queries, log_sums.transpose(-1, -2))
        return outs.total(q.dtype).transpose(0, 1), sums.total(torch.float32).transpose(1, 2)

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranges: KeyRanges
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`Kernels.attend_backward`."""
        of_queries = [x.transpose(0, 1) for x in (grad, q, out)]
        of_keys = [x.transpose(0, 1) for x in (k, v)]
        sums = log_sums.transpose(1, 2)
        totals = [_Rows(x, 0.0) for x in (of_queries[1], *of_keys)]
        for call in self.calls(ranges):
            out_grad, queries, output = (_taken(x, call.queries) for x in of_queries)
            keys, values = (_taken(x, call.keys) for x in of_keys)
            own_sums = _taken(sums, call.queries).transpose(-1, -2).contiguous()
            parts = self.kernel.backward(out_grad, queries, keys, values, output, own_sums, call)
            totals[0].put(call.queries, parts[0])
            for total, part in zip(totals[1:], parts[1:], strict=True):
                total.add(call.keys, part)
        q_grad, k_grad, v_grad = (total.total(q.dtype).transpose(0, 1) for total in totals)
        return q_grad, k_grad, v_grad


class _Rows:
    """Tensor of all sequences, (B, S, ...), assembled from results of calls; a result with all rows is not copied.

    Args:
        like: Tensor of the shape of the rows.
        fill: Value of rows that no call computes.
    """

    def __init__(self, like: Tensor, fill: float) -> None:
        self._like, self._fill = like, fill
        self._total: Tensor | None = None

    def put(self, indices: RowIndices, part: Tensor) -> None:
        """Store the rows of a call, which no other call computes."""
        if self._total is None:
            if indices is None:
                self._total = part.unflatten(0, self._like.shape[:2])
                return
            if indices == slice(0, self._like.shape[1]):
                self._total = part
                return
        if isinstance(indices, slice):
            self.total(part.dtype)[:, indices] = part
        else:
            assert indices is not None, "no other call gives a row"
            self.total(part.dtype).flatten(0, 1).index_copy_(0, indices, part)

    def add(self, indices: RowIndices, part: Tensor) -> None:
        """Add the rows of a call to the sum of the calls before, in float32 from the second call on."""
        if self._total is None:
            self.put(indices, part)
            return
        self._total = self._total.float()
        if isinstance(indices, slice):
            self._total[:, indices] += part
        elif indices is None:
            self._total.flatten(0, 1).add_(part)
        else:  # no row comes twice in a call, so that the sum has one order
            self._total.flatten(0, 1).index_add_(0, indices, part.float())

    def total(self, dtype: torch.dtype) -> Tensor:
        """Tensor with the rows so far; before the first call, a new one of the type `dtype`."""
        if self._total is None:
            self._total = torch.full(self._like.shape, self._fill, dtype=dtype, device=self._like.device)
        return self._total


def _taken(x: Tensor, indices: RowIndices) -> Tensor:
    """Select the rows of a call: (B, S, ...) to (B, T, ...), or to (T, ...) with offsets."""
    if isinstance(indices, slice):
        return x[:, indices]
    rows = x.flatten(0, 1)
    return rows if indices is None else rows.index_select(0, indices)


def _whole(tile: Tile) -> Call:
    """Call for the same tile of every sequence."""
    longest = tile.end - tile.start, tile.high - tile.low
    return Call(slice(tile.start, tile.end), slice(tile.low, tile.high), MaskKind(*tile[4:]), None, longest)


def _packed(starts: np.ndarray, queries: Pieces, keys: Pieces, window: int | None, device: torch.device) -> list[Call]:
    """Calls for sequences of packed documents.

    Args:
        starts: (B, Q) first position of each query's document.
    """
    last, positions = listed(queries), listed(keys)
    by_sequence = [tiles(first_seen(row, last, window), last, positions, slides=window is not None) for row in starts]
    calls = []
    for mask, members in waves(by_sequence):
        sides = []
        for length, spans in (
            (len(last), [(row, tile.start, tile.end) for row, tile in members]),
            (len(positions), [(row, tile.low, tile.high) for row, tile in members]),
        ):
            # Among the positions of all rows; None: all in order.
            places = np.concatenate([np.arange(row * length + start, row * length + end) for row, start, end in spans])
            are_all = np.array_equal(places, np.arange(length * len(starts)))
            indices = None if are_all else _uploaded(places, device)
            sizes = [end - start for _, start, end in spans]
            offsets = np.cumsum([0, *sizes], dtype=np.int32)
            sides.append((indices, _uploaded(offsets, device), max(sizes)))
        (own, own_offsets, most), (theirs, their_offsets, most_keys) = sides
        calls.append(Call(own, theirs, mask, (own_offsets, their_offsets), (most, most_keys)))
    return calls


def _uploaded(array: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to a device; on CUDA the host does not wait."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def failure(ranges: FlashRanges, device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """Try documents, a window, and pieces of a row on a device; return the reason why the kernel fails, or nothing.

    The outputs and gradients are compared with those of blocks in float32.
    """
    generator, length = torch.Generator().manual_seed(0), TRIAL_TOKENS
    shapes = [(length, 1, 4, head_size), *[(2 * length, 1, 2, head_size)] * 2]
    q, k, v = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    half = length // 2
    starts = torch.arange(length, device=device).div(half // 2, rounding_mode="floor").mul(half // 2).unsqueeze(0)
    pieces, row = (range(half), range(3 * half, 4 * half)), (range(2 * length),)
    own, whole = (torch.from_numpy(listed(side)).to(device) for side in (pieces, row))
    cut = replace(KeyRanges.of(None, own), keys=whole, known=(pieces, row))
    short = q, k[:length], v[:length]
    return trial(ranges, [(short, whole_rows(q, starts)), (short, whole_rows(q, None, half)), ((q, k, v), cut)])


def trial(kernels: AttentionToRanges, tries: Sequence[tuple[Sequence[Tensor], KeyRanges]]) -> str:
    """Compare attentions with those of blocks in float32; return the reason why the kernels fail, or nothing.

    Args:
        kernels: Kernels to try.
        tries: Queries, keys and values of each attention, and its ranges.
    """
    try:
        errors = []
        for given, tried in tries:
            actual = _passes(given, tried, kernels)
            wanted = _passes([x.float() for x in given], tried, Blocks())
            errors += [relative_error(x, y) for x, y in zip(actual, wanted, strict=True)]
        worst = float(torch.stack(errors).max())
    except Exception as error:  # drivers raise errors of their own
        return first_line(error)
    return wrong_numbers(worst)


def _passes(qkv: Sequence[Tensor], ranges: KeyRanges, kernels: AttentionToRanges) -> list[Tensor]:
    """Output and gradients of an attention to ranges."""
    q, k, v = qkv
    out, log_sums = kernels.attend(q, k, v, ranges)
    return [out, *kernels.attend_backward(q, q, k, v, out.to(q.dtype), log_sums, ranges)]
