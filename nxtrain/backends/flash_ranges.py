"""Masked attention by flash kernels without a mask: one kernel call per tile of queries and keys.

Masks are those of documents, sliding windows and context parallel ranks. The host divides queries and keys into tiles.
If each sequence is one document, one call computes a tile of all sequences. If documents are packed, their rows are
gathered, and one variable-length call computes the tiles of all documents. The backward pass calls the kernel's
backward with the log-sums over all keys, so each tile uses the softmax of the whole attention: Liu et al. 2023
(arXiv:2310.01889).

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

from nxtrain.backends.attention_tiles import (
    MaskKind,
    Tile,
    first_seen,
    group_into_calls,
    listed,
    tiles,
    undivided_tiles,
)
from nxtrain.backends.ranged_attention import AttentionToRanges, Blocks, whole_rows
from nxtrain.backends.sdpa_kernels import TRIAL_TOKENS, first_line, relative_error, wrong_numbers
from nxtrain.common.kernels import KeyRanges, Pieces

RowIndices = slice | Tensor | None


@dataclass(frozen=True)
class Call:
    """Arguments of one flash kernel call.

    Args:
        queries, keys: Without offsets, the slice of positions in every sequence. With offsets, the (T,) int64 row
            indices in the flattened batch of sequences; None for all rows in order.
        mask: Mask of the call.
        offsets: (tiles + 1,) int32 twice: first query and first key of each tile. None for one tile per sequence.
        longest: Most queries and most keys of a tile.
    """

    queries: RowIndices
    keys: RowIndices
    mask: MaskKind
    offsets: tuple[Tensor, Tensor] | None
    longest: tuple[int, int]


class FlashKernel(ABC):
    """Interface of a flash attention kernel, forward and backward.

    Queries are (B, T, N, H) and keys (B, T, M, H); with offsets (T, N, H) and (T, M, H). The diagonal of a causal mask
    ends in the last query and the last key of a tile. `log_sums` are (B, N, T) float32; with offsets (N, T).
    """

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Return the attention output, and the logarithms of the softmax denominators."""

    @abstractmethod
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries, keys and values; `log_sums` may include the keys of other calls."""


class TorchFlash(FlashKernel):
    """torch's FlashAttention on GPUs, or a newer release of FlashAttention that replaces it.

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
    """Return the offsets and lengths of a call in torch's order, and its window sizes; -1 means no limit."""
    queries, keys = call.offsets or (None, None)
    sides = {}
    if call.mask.window is not None:
        sides = {"window_size_left": call.mask.window, "window_size_right": 0 if call.mask.causal else -1}
    return (queries, keys, *call.longest), sides


@dataclass(frozen=True)
class FlashRanges:
    """Attention to key ranges by a flash kernel, for `Kernels.attend` and `Kernels.attend_backward`.

    Args:
        kernel: Flash kernel.
        copies: Host copies of uploaded tensors, from which first positions of documents are read.
    """

    kernel: FlashKernel
    copies: WeakTensorKeyDictionary
    _calls: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def calls(self, ranges: KeyRanges) -> Sequence[Call]:
        """Return the flash kernel calls for key ranges; calls for packed documents are cached per uploaded tensor."""
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
        """Compute `Kernels.attend` with the flash kernel."""
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
        """Compute `Kernels.attend_backward` with the flash kernel."""
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
    """Result tensor (B, S, ...), assembled from the rows of several kernel calls; one call with all rows is not copied.

    Args:
        like: Tensor with the shape of the result.
        fill: Value of rows that no call computes.
    """

    def __init__(self, like: Tensor, fill: float) -> None:
        self._like, self._fill = like, fill
        self._total: Tensor | None = None

    def put(self, indices: RowIndices, part: Tensor) -> None:
        """Store result rows of a call; no other call computes the same rows."""
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
        """Add rows of a call to the sum over the earlier calls, in float32 from the second call on."""
        if self._total is None:
            self.put(indices, part)
            return
        self._total = self._total.float()
        if isinstance(indices, slice):
            self._total[:, indices] += part
        elif indices is None:
            self._total.flatten(0, 1).add_(part)
        else:  # no row occurs twice in a call, so the sum has one order
            self._total.flatten(0, 1).index_add_(0, indices, part.float())

    def total(self, dtype: torch.dtype) -> Tensor:
        """Return the result with the rows so far; before the first call, a new tensor of type `dtype`."""
        if self._total is None:
            self._total = torch.full(self._like.shape, self._fill, dtype=dtype, device=self._like.device)
        return self._total


def _taken(x: Tensor, indices: RowIndices) -> Tensor:
    """Select the input rows of a call from (B, S, ...): (B, T, ...), or (T, ...) with offsets."""
    if isinstance(indices, slice):
        return x[:, indices]
    rows = x.flatten(0, 1)
    return rows if indices is None else rows.index_select(0, indices)


def _whole(tile: Tile) -> Call:
    """Return the call that computes the same tile of every sequence."""
    longest = tile.end - tile.start, tile.high - tile.low
    return Call(slice(tile.start, tile.end), slice(tile.low, tile.high), MaskKind(*tile[4:]), None, longest)


def _packed(starts: np.ndarray, queries: Pieces, keys: Pieces, window: int | None, device: torch.device) -> list[Call]:
    """Return the flash kernel calls for sequences of packed documents.

    Args:
        starts: (B, Q) first position of each query's document.
    """
    last, positions = listed(queries), listed(keys)
    by_sequence = [tiles(first_seen(row, last, window), last, positions, slides=window is not None) for row in starts]
    calls = []
    for mask, members in group_into_calls(by_sequence):
        sides = []
        for length, spans in (
            (len(last), [(row, tile.start, tile.end) for row, tile in members]),
            (len(positions), [(row, tile.low, tile.high) for row, tile in members]),
        ):
            # Row indices in the flattened batch; None for all rows in order.
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
    """Copy a numpy array to a device; on CUDA the copy is asynchronous."""
    host = torch.from_numpy(array)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def failure(ranges: FlashRanges, device: torch.device, dtype: torch.dtype, head_size: int) -> str:
    """Test a flash kernel on a device with documents, a window and a sequence cut into pieces.

    Outputs and gradients are compared with those of blocked attention in float32.

    Returns:
        Reason why the kernel fails; empty if it is correct.
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
    """Compare attention kernels with blocked attention in float32; return the reason why they fail, or nothing.

    Args:
        kernels: Kernels to try.
        tries: Queries, keys and values of each trial, and its key ranges.
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
    """Compute the output and the gradients of attention to key ranges."""
    q, k, v = qkv
    out, log_sums = kernels.attend(q, k, v, ranges)
    return [out, *kernels.attend_backward(q, q, k, v, out.to(q.dtype), log_sums, ranges)]
