"""Interface of a device's kernels: operations with an implementation for each kind of device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nxtrain.common.blockwise import BlockwiseKernel
    from nxtrain.common.vocab import VocabColumns

Function = TypeVar("Function", bound=Callable[..., object])

Pieces = tuple[range, ...]
"""Ascending positions."""


class MeanDecay(NamedTuple):
    """Weights of a running mean in an update: of the mean before, of a new value, and their sum so far, () float32."""

    keep: float | Tensor
    add: float | Tensor
    correction: Tensor


@dataclass(frozen=True)
class AdamStep:
    """Arguments of an AdamW update.

    Args:
        lr: () float32, on the device, so that a new value needs no new graph.
        step: () float32, on the device, updates done including this one.
        grad_scale: () float32, on the device, multiplies every gradient.
        betas, eps: As in Loshchilov and Hutter 2019 (arXiv:1711.05101), with a decoupled weight decay.
        weight_decay: If it changes, () float32, on the device.
        skip: () bool, on the device, keeps every tensor unchanged, bit for bit; None: never.
        means: Weights of both running means, in place of `betas` that change; None: `betas` are those of all updates.
    """

    lr: Tensor
    step: Tensor
    grad_scale: Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float | Tensor
    skip: Tensor | None = None
    means: tuple[MeanDecay, MeanDecay] | None = None


@dataclass(frozen=True)
class RoundingKey:
    """Key of a tensor's random bits, without the step; made by `nxtrain.optim.rounding`.

    Args:
        rows: (R,) int32, hash of seed, name and global row, odd.
        pairs: (P,) int32, hash of the number of each pair of columns.
        columns: (C,) int32, hash of the number of each column's pair.
        odd: (C,) bool, the column takes the high half.
        begins_odd: The first column is the second of its pair.
        shared: Other ranks round the same entries with the same key, and the results must be equal. Hardware that draws
            its own bits cannot be used.
        alone: Each column has a word of its own, whose low half it takes: P = C, and no column is odd. Columns of
            several tensors are side by side, and their pairs may begin at odd places.
    """

    rows: Tensor
    pairs: Tensor
    columns: Tensor
    odd: Tensor
    begins_odd: bool
    shared: bool
    alone: bool = False

    def narrow(self, start: int, num_rows: int) -> RoundingKey:
        """Key of adjacent rows."""
        return replace(self, rows=self.rows.narrow(0, start, num_rows))


@dataclass(frozen=True)
class Rows:
    """Adjacent rows of a parameter.

    Args:
        start, number: First row and number of rows.
        whole: The rows are all rows of the parameter.
    """

    name: str
    start: int
    number: int
    whole: bool

    def of(self, x: Tensor) -> Tensor:
        """View of the rows in a tensor of the parameter's shape."""
        return x if self.whole else x.narrow(0, self.start, self.number)


@dataclass(frozen=True)
class KeyRanges:
    """Keys that each query of an attention sees: those whose positions lie in a range.

    Args:
        first: (B, Q) int64, first position that each query sees; one row may serve all sequences.
        last: (Q,) int64, last position that each query sees, which is its own; ascending.
        keys: (K,) int64, positions of the keys; ascending.
        window: Most positions that a query sees, its own among them; None: no limit.
        known: Positions of the queries and of the keys on the host, of which a graph may be made; None: they differ
            between ranks that share a graph.
        starts: (B, Q) int64, first position of each query's document, as it was uploaded; None: a row is one document.
            This is read with `known` alone.
    """

    first: Tensor
    last: Tensor
    keys: Tensor
    window: int | None = None
    known: tuple[Pieces, Pieces] | None = None
    starts: Tensor | None = None

    @staticmethod
    def of(starts: Tensor | None, positions: Tensor, window: int | None = None) -> KeyRanges:
        """Ranges of queries that see the keys of their document, and at most a window of them.

        Args:
            starts: (B, Q) int64, first position of each query's document; None: a row is one document.
            positions: (Q,) int64, positions of the queries and of the keys.
        """
        # One row of zeros serves all sequences of a batch.
        first = positions.new_zeros(1, len(positions)) if starts is None else starts
        if window is not None:
            first = first.clamp(min=positions - (window - 1))
        return KeyRanges(first, positions, positions, window=window, starts=starts)


@dataclass(frozen=True)
class Grouping:
    """Rows that grouped products want of a group.

    Args:
        multiple: Every group has a multiple of so many rows.
        counted: The host knows the rows of each group. If not, every group has rows.
        even: Ranks are taken to exchange equal numbers of rows, since tensors have shapes and no values.
    """

    multiple: int = 1
    counted: bool = True
    even: bool = False


ANY_ROWS = Grouping()
"""Groups of any number of rows."""


@dataclass(frozen=True)
class RowGroups:
    """Division of rows into adjacent groups, together all rows.

    Args:
        ends: (E,) int32, on the device, row after the last one of each group.
        counts: Rows of each group on the host; None: only the device knows them.
    """

    ends: Tensor
    counts: Sequence[int] | None

    @staticmethod
    def of(heights: Tensor, grouping: Grouping = ANY_ROWS) -> RowGroups:
        """Groups of given numbers of rows, (E,) int64."""
        counts = heights.tolist() if grouping.counted else None
        return RowGroups(heights.cumsum(0).int(), counts)


@dataclass(frozen=True)
class Float8Matrix:
    """Matrix in float8, whose entries are multiples of scales.

    Args:
        values: (M, K) float8_e4m3fn or float8_e5m2, contiguous.
        scales: float32, of the whole matrix (1, 1), of each row (M, 1), or of each 32 columns of a row (M, K / 32). The
            last are powers of two.
    """

    values: Tensor
    scales: Tensor

    @property
    def has_blocks(self) -> bool:
        """A row has several scales."""
        return self.scales.shape[1] > 1


class Kernels(ABC):
    """Operations with an implementation for each kind of device.

    Attributes:
        host_may_look: The host can read a number in the middle of a step at no cost.
        sums_lists: `square_sums` takes few launches for many tensors, and adds up short sums.
        makes_zeros: Zeros that the device makes have memory of their own, and are not constants of a graph.
        adds_products: `add_product` needs no memory for the product.
        rounds: The device rounds casts from float32 to bfloat16 at random. Ranks may round equal values differently.
        rounds_on_host: `stochastic_round` leaves the device, so that no graph can contain it.
        static_shapes: The device compiles each shape anew, so that no shape should depend on data.
        blockwise: Kernel of all experts of a rank; None: their products are operations of their own.
    """

    host_may_look: bool = False
    sums_lists: bool = False
    makes_zeros: bool = False
    adds_products: bool = False
    rounds: bool = False
    rounds_on_host: bool = False
    static_shapes: bool = False
    blockwise: BlockwiseKernel | None = None

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Product x @ weight.T, which autograd differentiates: (..., I), (O, I) to (..., O)."""

    @abstractmethod
    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Product a @ b inside of a backward pass, without a gradient: (..., K), (K, N) to (..., N)."""

    @abstractmethod
    def float8_matmul(self, a: Float8Matrix, b: Float8Matrix, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        """Product a @ b.T, without a gradient: (M, K), (N, K) to (M, N); K and N are multiples of 16.

        Args:
            a, b: Matrices whose scales are of one kind.
            dtype: Type of the product.
            fast: The device may add up in fewer bits than float32 has.
        """

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """Add the product a @ b to `total` in place, without a gradient: (M, N) float32, (M, K), (K, N)."""
        total.add_(self.matmul(a, b))

    def grouping(self, dtype: torch.dtype, sizes: Sequence[int]) -> Grouping:
        """Groups of rows for products of a type.

        Args:
            sizes: Every size of the matrices.
        """
        return ANY_ROWS

    @abstractmethod
    def grouped_matmul(self, rows: Tensor, matrices: Tensor, groups: RowGroups) -> Tensor:
        """Product of each group of rows with its matrix, without a gradient: (N, K), (E, K, M) to (N, M)."""

    @abstractmethod
    def grouped_gradient(self, left: Tensor, right: Tensor, groups: RowGroups, out: Tensor) -> None:
        """Product left.T @ right of the rows of each group, zeros for a group without rows.

        Args:
            left, right: (N, K) and (N, M).
            out: Result, (E, K, M), any view of a matrix.
        """

    @abstractmethod
    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention of grouped queries, scaled by 1/sqrt(head_dim).

        Args:
            q: (S, B, num_heads, head_dim).
            k, v: (S, B, num_kv_heads, head_dim); each serves num_heads / num_kv_heads adjacent query heads.

        Returns:
            (S, B, num_heads, head_dim).
        """

    @abstractmethod
    def document_attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None = None
    ) -> Tensor:
        """Causal attention inside of documents: a query sees the keys of its document up to its position.

        Args:
            q, k, v: As for `attention`.
            starts: (B, S) int64, first position of each position's document; None: a row is one document.
            window: Most positions that a query sees, its own among them; None: no limit.

        Returns:
            (S, B, num_heads, head_dim).
        """

    def sees(self, ranges: KeyRanges) -> bool:
        """False if the host knows at no cost that no query sees a key."""
        return True

    @abstractmethod
    def sink_attention(  # 6 arguments: those of `document_attention`, and the sinks
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, starts: Tensor | None, window: int | None = None
    ) -> Tensor:
        """As `document_attention`, with a further score in the softmax of each query, which has no key and no value.

        Args:
            q, k, v, starts, window: As for `document_attention`.
            sinks: (num_heads,), score of each head.

        Returns:
            (S, B, num_heads, head_dim).
        """

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        """Attention of some queries to some keys, without a gradient; memory is linear in queries and in keys.

        Args:
            q: (Q, B, num_heads, head_dim).
            k, v: (K, B, num_kv_heads, head_dim).
            ranges: Keys that each query sees.

        Returns:
            Output (Q, B, num_heads, head_dim) in float32 or in the type of `q`, zeros for a query that sees none of the
            keys, and the logarithm of the sum of each query's weights, (B, num_heads, Q) float32, -inf for such a
            query.
        """

    @abstractmethod
    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranges: KeyRanges
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the queries, keys and values of `attend`; `log_sums` may include further keys.

        The gradients are in float32 or in the type of `q`.

        Args:
            grad, out: Gradient and output of the attention to all keys, (Q, B, num_heads, head_dim).
            log_sums: Logarithms of the sums of the weights of all keys.
            k, v, ranges: Some of the keys; the gradients are those that come from these keys.
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm x / rms(x) * weight over the last dimension, rounded once: (..., D), (D,) to (..., D)."""

    @abstractmethod
    def swiglu(self, gate_up: Tensor) -> Tensor:
        """Gated activation silu(gate) * up of a concatenated input, all that is saved: (..., 2F) to (..., F)."""

    @abstractmethod
    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate each pair of dimensions (i, i + H/2) by its position's angle.

        Args:
            x: (S, B, N, H).
            cos, sin: (S, 1, 1, H/2) float32, of the angles, times a factor that YaRN may have.

        Returns:
            (S, B, N, H).
        """

    @abstractmethod
    def cross_entropy(
        self, logits: Tensor, targets: Tensor, columns: VocabColumns, *, needs_grad: bool, z_loss: float = 0.0
    ) -> tuple[Tensor, Tensor | None]:
        """Cross entropies of some tokens over a sharded vocabulary, and the gradient of their sum by the logits.

        The arithmetic on logits is float32.

        Args:
            logits: (T, V), this rank's columns; may be overwritten.
            targets: (T,) over the whole vocabulary, or `IGNORE_INDEX`. Or (T, 2R): R ids and R probabilities in
                `PROBABILITY_UNITS`, whose sum is 1; a token whose first id is `IGNORE_INDEX` does not count.
            z_loss: Factor of the squared log of the softmax's denominator, which each token that counts adds. Source:
                Chowdhery et al. 2022, PaLM (arXiv:2204.02311), section 5.

        Returns:
            The cross entropies, (T,) float32, 0 for `IGNORE_INDEX`, and the gradient, (T, V) in the type of `logits`,
            or None. With `z_loss`, the added terms as well: (2, T) float32; the gradient is that of both sums.
        """

    @abstractmethod
    def recompute(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Compute `function(*inputs)`, saving only the inputs; the backward pass calls the function again.

        Args:
            function: Deterministic function, without random numbers.
            inputs: Arguments; tensors among them receive gradients, like the parameters that the function uses.
        """

    def order(self, tensors: Sequence[Tensor]) -> None:
        """Make a compiler of graphs compute all of some tensors before what is computed from any of them afterwards.

        Eager devices compute in the order of the code.
        """

    @abstractmethod
    def row_square_sums(self, x: Tensor) -> Tensor:
        """Sum of the squares of each row in float32: (R, C) to (R,)."""

    def square_sums(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Sum of the squares of each of some tensors, () float32."""
        return [self.row_square_sums(tensor.reshape(1, -1)).sum() for tensor in tensors]

    def fuse(self, function: Function, *, any_size: bool = False) -> Function:
        """Fuse a function into one graph with the same results, on devices that need it; else return the function.

        The host reads nothing in the function. Numbers that change from call to call are tensors.

        Args:
            any_size: Tensors differ in size between calls. One graph serves all sizes where the compiler can do that.
        """
        return function

    def tiles(self, shapes: Mapping[str, Sequence[int]]) -> list[list[Rows]]:
        """Division of an update into calls of `adamw`: one call, unless the device prefers otherwise."""
        rows = [Rows(name, 0, shape[0], whole=True) for name, shape in shapes.items() if shape[0]]
        return [rows] if rows else []

    @abstractmethod
    def adamw(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        how: AdamStep,
    ) -> None:
        """Apply one AdamW update in place to contiguous float32 tensors of equal shapes; may overwrite `grads`.

        The result of an entry does not depend on the entry's position in a tensor.
        """

    @abstractmethod
    def bits(self, x: Tensor) -> Tensor:
        """Bits of float32 as int32 of the same shape."""

    @abstractmethod
    def replace(self, x: Tensor, new: Tensor, unless: Tensor) -> None:
        """Overwrite `x` with new values, rounded to nearest, unless the () bool `unless` is true."""

    @abstractmethod
    def stochastic_round(self, x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
        """Round to one of the two nearest bfloat16 values, the nearer value more likely, so that the mean is `x`.

        Values of bfloat16, infinities and NaN are unchanged; a value rounded above the largest number becomes infinite.
        The result depends on the arguments alone, and is the same on every device that rounds in software. A device may
        draw its own bits instead, unless the key is shared.

        Args:
            x: float32; may be overwritten.
            out: Result of the shape of `x`, bfloat16 or float32; may be `x`.
            key: Key of the random bits; a row of the key is an index of dimension 0.
            step: () int32, `step_hash` of the number of updates.
        """
