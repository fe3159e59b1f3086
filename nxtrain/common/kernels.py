"""Interface of the device kernels: operations that have an implementation for each kind of device."""

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
"""Ascending ranges of sequence positions."""


class MeanDecay(NamedTuple):
    """Weights of a moving average in AdamW: of the old average, of a new value, and their sum so far, () float32."""

    keep: float | Tensor
    add: float | Tensor
    correction: Tensor


@dataclass(frozen=True)
class AdamStep:
    """Arguments of an AdamW update.

    Args:
        lr: Learning rate, () float32 on the device, so that a new value needs no new graph.
        step: Number of updates including this one, () float32 on the device.
        grad_scale: Factor of every gradient, () float32 on the device.
        betas, eps: As in Loshchilov and Hutter 2019 (arXiv:1711.05101), with a decoupled weight decay.
        weight_decay: Weight decay; () float32 on the device if it has a schedule.
        skip: () bool on the device; True leaves every tensor unchanged, bit for bit. None never skips.
        means: Weights of both moving averages if the betas change during the run; None if `betas` are constant.
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
    """Key of the random bits for stochastic rounding of a tensor, without the step; made by `nxtrain.optim.rounding`.

    Args:
        rows: (R,) int32, odd hash of the seed, the parameter name and the global row.
        pairs: (P,) int32, hash of the index of each pair of columns.
        columns: (C,) int32, hash of the index of each column's pair.
        odd: (C,) bool, True for a column that uses the high half of its pair's random word.
        begins_odd: The first column is the second column of its pair.
        shared: Other ranks round the same entries with the same key and must get equal results. Hardware random bits
            cannot be used.
        alone: Each column uses the low half of its own random word, so P = C, and no column is odd. For columns of
            several tensors side by side, whose pairs may begin at odd offsets.
    """

    rows: Tensor
    pairs: Tensor
    columns: Tensor
    odd: Tensor
    begins_odd: bool
    shared: bool
    alone: bool = False

    def narrow(self, start: int, num_rows: int) -> RoundingKey:
        """Key of `num_rows` adjacent rows from row `start` on."""
        return replace(self, rows=self.rows.narrow(0, start, num_rows))


@dataclass(frozen=True)
class Rows:
    """A range of adjacent rows of a parameter.

    Args:
        name, start, number: Parameter name, first row, and number of rows.
        whole: The range has all rows of the parameter.
    """

    name: str
    start: int
    number: int
    whole: bool

    def of(self, x: Tensor) -> Tensor:
        """View of these rows in a tensor with the parameter's shape."""
        return x if self.whole else x.narrow(0, self.start, self.number)


@dataclass(frozen=True)
class KeyRanges:
    """Attention mask as ranges: each query attends to the keys whose positions lie between two positions.

    Args:
        first: (B, Q) int64, first position to which each query attends; one row may serve all sequences.
        last: (Q,) int64, last position to which each query attends, which is its own position; ascending.
        keys: (K,) int64, positions of the keys; ascending.
        window: Sliding window of attention in positions, the query's own included; None without a window.
        known: Positions of the queries and of the keys, known to the host, so that a graph may depend on them. None if
            the positions differ between ranks that share a graph.
        starts: (B, Q) int64, first position of each query's document, as uploaded. None if each row is one document.
            Used only together with `known`.
    """

    first: Tensor
    last: Tensor
    keys: Tensor
    window: int | None = None
    known: tuple[Pieces, Pieces] | None = None
    starts: Tensor | None = None

    @staticmethod
    def of(starts: Tensor | None, positions: Tensor, window: int | None = None) -> KeyRanges:
        """Ranges for causal attention inside documents, optionally limited to a sliding window.

        Args:
            starts: (B, Q) int64, first position of each query's document; None if each row is one document.
            positions: (Q,) int64, positions of the queries and of the keys.
        """
        # One row of zeros serves all sequences of a batch.
        first = positions.new_zeros(1, len(positions)) if starts is None else starts
        if window is not None:
            first = first.clamp(min=positions - (window - 1))
        return KeyRanges(first, positions, positions, window=window, starts=starts)


@dataclass(frozen=True)
class Grouping:
    """Constraints of a grouped matrix product on the rows of its groups.

    Args:
        multiple: Every group must have a multiple of this number of rows.
        counted: The host knows the number of rows of each group. Otherwise no group may be empty.
        even: Assume that ranks exchange equal numbers of rows, since tensors have only shapes and no values.
    """

    multiple: int = 1
    counted: bool = True
    even: bool = False


ANY_ROWS = Grouping()
"""Grouping without constraints on the number of rows."""


@dataclass(frozen=True)
class RowGroups:
    """Division of all rows of a matrix into adjacent groups, for a grouped matrix product.

    Args:
        ends: (E,) int32 on the device, end row (exclusive) of each group.
        counts: Number of rows of each group on the host; None if only the device knows them.
    """

    ends: Tensor
    counts: Sequence[int] | None

    @staticmethod
    def of(heights: Tensor, grouping: Grouping = ANY_ROWS) -> RowGroups:
        """Groups with the given numbers of rows, (E,) int64."""
        counts = heights.tolist() if grouping.counted else None
        return RowGroups(heights.cumsum(0).int(), counts)


@dataclass(frozen=True)
class Float8Matrix:
    """Matrix in float8 with float32 scales, which multiply the entries.

    Args:
        values: (M, K) float8_e4m3fn or float8_e5m2, contiguous.
        scales: float32, one for the whole matrix (1, 1), for each row (M, 1), or for each 32 columns of a row (M, K /
            32). Scales of 32 columns are powers of two.
    """

    values: Tensor
    scales: Tensor

    @property
    def has_blocks(self) -> bool:
        """True if a row has several scales."""
        return self.scales.shape[1] > 1


class Kernels(ABC):
    """Operations that have an implementation for each kind of device.

    Attributes:
        host_reads_are_free: The host can read a device value in the middle of a step at no cost.
        sums_lists: `square_sums` needs few kernel launches for many tensors, and adds up short partial sums.
        makes_zeros: Zeros created on the device have their own memory, and are not constants of a graph.
        adds_products: `add_product` needs no temporary memory for the product.
        rounds: The device rounds casts from float32 to bfloat16 stochastically. Ranks may round equal values
            differently.
        rounds_on_host: `stochastic_round` runs on the host, so that no graph can contain it.
        static_shapes: The device compiles a graph for each shape, so no shape should depend on data.
        blockwise: Kernel for all experts of a rank; None if experts use grouped matrix products instead.
    """

    host_reads_are_free: bool = False
    sums_lists: bool = False
    makes_zeros: bool = False
    adds_products: bool = False
    rounds: bool = False
    rounds_on_host: bool = False
    static_shapes: bool = False
    blockwise: BlockwiseKernel | None = None

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Differentiable product x @ weight.T: (..., I), (O, I) to (..., O)."""

    @abstractmethod
    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Product a @ b without autograd, for use in a backward pass: (..., K), (K, N) to (..., N)."""

    @abstractmethod
    def float8_matmul(self, a: Float8Matrix, b: Float8Matrix, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        """Product a @ b.T of float8 matrices without autograd: (M, K), (N, K) to (M, N); K and N are multiples of 16.

        Args:
            a, b: Matrices with the same kind of scales.
            dtype: Type of the product.
            fast: The device may accumulate in fewer bits than float32 has.
        """

    def add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """Add the product a @ b to `total` in place, without autograd: (M, N) float32, (M, K), (K, N)."""
        total.add_(self.matmul(a, b))

    def grouping(self, dtype: torch.dtype, sizes: Sequence[int]) -> Grouping:
        """Constraints of `grouped_matmul` on the rows of groups, for a dtype.

        Args:
            sizes: All dimensions of the matrices.
        """
        return ANY_ROWS

    @abstractmethod
    def grouped_matmul(self, rows: Tensor, matrices: Tensor, groups: RowGroups) -> Tensor:
        """Product of each group of rows with its own matrix, without autograd: (N, K), (E, K, M) to (N, M)."""

    @abstractmethod
    def grouped_gradient(self, left: Tensor, right: Tensor, groups: RowGroups, out: Tensor) -> None:
        """Weight gradients of `grouped_matmul`: left.T @ right for the rows of each group, zeros for an empty group.

        Args:
            left, right: (N, K) and (N, M).
            out: Result, (E, K, M), any view of a matrix.
        """

    @abstractmethod
    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal grouped-query attention, with scores scaled by 1/sqrt(head_dim).

        Args:
            q: (S, B, num_heads, head_dim).
            k, v: (S, B, num_kv_heads, head_dim). Each key-value head serves num_heads / num_kv_heads adjacent query
                heads.

        Returns:
            (S, B, num_heads, head_dim).
        """

    @abstractmethod
    def document_attention(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, window: int | None = None
    ) -> Tensor:
        """Causal attention inside documents: a query attends to keys of its document up to its position.

        Args:
            q, k, v: As for `attention`.
            starts: (B, S) int64, first position of each position's document; None if each row is one document.
            window: Sliding window in positions, the query's own included; None without a window.

        Returns:
            (S, B, num_heads, head_dim).
        """

    def has_visible_keys(self, ranges: KeyRanges) -> bool:
        """False if the host knows at no cost that the mask lets no query attend to any key."""
        return True

    @abstractmethod
    def sink_attention(  # 6 arguments: those of `document_attention`, and the sinks
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, starts: Tensor | None, window: int | None = None
    ) -> Tensor:
        """As `document_attention`, with an attention sink: a further score without key and value in each softmax.

        Args:
            q, k, v, starts, window: As for `document_attention`.
            sinks: (num_heads,), sink score of each head.

        Returns:
            (S, B, num_heads, head_dim).
        """

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        """Attention of some queries to some keys, without autograd; memory is linear in queries and in keys.

        Args:
            q: (Q, B, num_heads, head_dim).
            k, v: (K, B, num_kv_heads, head_dim).
            ranges: Keys to which each query attends.

        Returns:
            Output (Q, B, num_heads, head_dim) in float32 or in the dtype of `q`, and the log-sum-exp of each query's
            scores, (B, num_heads, Q) float32. A query without keys has zeros and -inf.
        """

    @abstractmethod
    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranges: KeyRanges
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the queries, keys and values of `attend`; `log_sums` may also cover keys that are not in `k`.

        The gradients are in float32 or in the dtype of `q`.

        Args:
            grad, out: Gradient and output of the attention to all keys, (Q, B, num_heads, head_dim).
            log_sums: Log-sum-exp of the scores over all keys.
            k, v, ranges: Some of the keys, values and their mask. Only the contributions of these keys are returned.
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm x / rms(x) * weight over the last dimension, rounded once: (..., D), (D,) to (..., D)."""

    @abstractmethod
    def swiglu(self, gate_up: Tensor) -> Tensor:
        """SwiGLU silu(gate) * up of a concatenated input, of which only the input is saved: (..., 2F) to (..., F)."""

    @abstractmethod
    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary position embedding: rotate each pair of dimensions (i, i + H/2) by the angle of its position.

        Args:
            x: (S, B, N, H).
            cos, sin: (S, 1, 1, H/2) float32, cosine and sine of the angles, times YaRN's factor if any.

        Returns:
            (S, B, N, H).
        """

    @abstractmethod
    def cross_entropy(
        self, logits: Tensor, targets: Tensor, columns: VocabColumns, *, needs_grad: bool, z_loss: float = 0.0
    ) -> tuple[Tensor, Tensor | None]:
        """Cross entropies of tokens over a sharded vocabulary, and the gradient of their sum by the logits.

        The arithmetic on logits is float32.

        Args:
            logits: (T, V), this rank's columns of the logits; may be overwritten.
            targets: (T,) token ids, or `IGNORE_INDEX`. With soft targets (T, 2R): R ids and R probabilities in
                `PROBABILITY_UNITS`, whose sum is 1. A token whose first id is `IGNORE_INDEX` does not count.
            z_loss: Coefficient of the z-loss, the squared log-sum-exp of the logits of each token that counts. Source:
                Chowdhery et al. 2022, PaLM (arXiv:2204.02311), section 5.

        Returns:
            The cross entropies, (T,) float32, 0 for `IGNORE_INDEX`, and the gradient, (T, V) in the dtype of `logits`,
            or None. With `z_loss`, cross entropies and z-losses together, (2, T) float32; the gradient is of both sums.
        """

    @abstractmethod
    def recompute(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Activation checkpointing: compute `function(*inputs)`, save only the inputs, and recompute in backward.

        Args:
            function: Deterministic function, without random numbers.
            inputs: Arguments. Tensors among them, and parameters that the function uses, receive gradients.
        """

    def order(self, tensors: Sequence[Tensor]) -> None:
        """Add an ordering constraint to a lazy graph: compute all given tensors before anything that depends on one."""

    @abstractmethod
    def row_square_sums(self, x: Tensor) -> Tensor:
        """Sum of squares of each row in float32: (R, C) to (R,)."""

    def square_sums(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Sum of squares of each given tensor, () float32."""
        return [self.row_square_sums(tensor.reshape(1, -1)).sum() for tensor in tensors]

    def fuse(self, function: Function, *, any_size: bool = False) -> Function:
        """Compile a function into one graph on devices that benefit; return the function unchanged on other devices.

        Inside the function, the host must not read device values. Numbers that change between calls must be tensors.

        Args:
            any_size: Tensors differ in size between calls. One graph serves all sizes where the compiler can do that.
        """
        return function

    def tiles(self, shapes: Mapping[str, Sequence[int]]) -> list[list[Rows]]:
        """Division of an optimizer update into calls of `adamw`, by rows of parameters; one call by default."""
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
        """Apply one AdamW update in place to contiguous float32 tensors; may overwrite `grads`.

        All have equal shapes. The result of an entry does not depend on its position in a tensor.
        """

    @abstractmethod
    def bits(self, x: Tensor) -> Tensor:
        """Reinterpret the bits of a float32 tensor as int32 of the same shape."""

    @abstractmethod
    def replace(self, x: Tensor, new: Tensor, unless: Tensor) -> None:
        """Overwrite `x` with `new`, rounded to nearest, unless the () bool `unless` is True."""

    @abstractmethod
    def stochastic_round(self, x: Tensor, out: Tensor, key: RoundingKey, step: Tensor) -> None:
        """Stochastic rounding to bfloat16: choose one of the two nearest values at random, so that the mean is `x`.

        Values of bfloat16, infinities and NaN are unchanged. A value rounded above the largest number becomes infinite.
        The result depends only on the arguments, and is equal on every device that rounds in software. A device may use
        hardware random bits instead, unless the key is shared.

        Args:
            x: float32; may be overwritten.
            out: Result of the shape of `x`, bfloat16 or float32; may be `x`.
            key: Key of the random bits, with one row for each index of dimension 0.
            step: () int32, `step_hash` of the number of updates.
        """
