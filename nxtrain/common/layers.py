"""Interface of the tensor parallel layers, implemented by nxtrain itself or by a vendor's library.

Models are built from these layers only. In every implementation, a layer has parameters of the same name, shape and
`ShardSpec`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nxtrain.common.dimensions import MoeShape
    from nxtrain.common.mesh import Axis
    from nxtrain.common.sharding import Init, Segment, ShardSpec


class Head(Protocol):
    """Interface of the output projection and its loss, which never materializes all logits at once.

    Attributes:
        weight: Weight of the projection.
        specs: Shard specs of the parameters, by name.
        scale: Function that returns a factor of the loss gradients, () float32; None for 1.
    """

    weight: nn.Parameter
    specs: dict[str, ShardSpec]
    scale: Callable[[], Tensor] | None

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of hidden (S/tp, B, D) and targets (S, B): sum over tokens (), or one loss per token (S, B)."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits on every rank: hidden (S/tp, B, D) to (S, B, vocab_size) float32; not differentiable."""
        ...


class ContextAttention(ABC):
    """Context parallel attention: attention between ranks that share the positions of each sequence.

    Attributes:
        positions: Sequence positions of this rank, ascending, on the host: (S,) int64.
    """

    positions: Tensor

    @abstractmethod
    def learn(self, uploaded: Tensor, starts: Tensor) -> None:
        """Register the document boundaries of whole sequences, before attention to these sequences.

        Every rank has read the whole sequences.

        Args:
            uploaded: (B, S) `starts` at the positions of this rank, on the device. The registration ends when this
                tensor is freed.
            starts: First position of each position's document, for all positions of the same rows, on the host.
        """

    @abstractmethod
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, starts: Tensor | None, window: int | None = None
    ) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks.

        The shapes are q (S, B, N, H), k and v (S, B, K, H) to (S, B, N, H).

        Args:
            q, k, v: Queries, keys and values at the positions of this rank.
            positions: (S,) int64, this rank's positions on the device. As tensor data, they leave the graphs of all
                ranks equal.
            starts: (B, S) int64, first position of each position's document; None if each row is one document.
            window: Sliding window in positions, the query's own included; None without a window.
        """


class RingAttention(ABC):
    """Kernel of causal ring attention between context parallel ranks."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Attention output of this rank's queries, and a tensor for backward: q (T, B, N, H), k and v (T, B, K, H)."""

    @abstractmethod
    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of this rank's queries, keys and values, given the gradient of the attention output."""


class RouterLosses(ABC):
    """Auxiliary losses of the routers of a mixture-of-experts model."""

    @abstractmethod
    def add_to(
        self, loss: Tensor, routing: Tensor, targets: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Add the gradients of the router losses to a loss; the value of the loss stays unchanged.

        Args:
            loss: (), sum of this rank's cross entropies.
            routing: (2E + 4,) float32, routing statistics summed over all layers.
            targets: (S, B) token ids; a token with `IGNORE_INDEX` does not count.
            scale: Factor of the gradients, () float32; None for 1.

        Returns:
            The loss, and in training the tensor of `CausalLM.routing`.
        """


class LayerSet(ABC):
    """Factory of the tensor parallel layers of one rank, with nxtrain's own layers or a vendor's layers.

    All implementations give their parameters the same names, shapes and `ShardSpec`s.

    Attributes:
        tp: Tensor parallel axis.
        sequence_parallel: Activations between these layers are sharded along the sequence, (S / tp, B, D).
    """

    tp: Axis
    sequence_parallel: bool

    @abstractmethod
    def column(self, in_features: int, segments: tuple[Segment, ...], init: Init, *, bias: bool = False) -> nn.Module:
        """Column-parallel linear layer, (S/tp, B, in) to (S, B, out/tp), with its segments concatenated.

        A bias is initialized to zeros.
        """

    @abstractmethod
    def row(self, in_features: int, out_features: int, init: Init, *, bias: bool = False) -> nn.Module:
        """Row-parallel linear layer, (S, B, in/tp) to (S/tp, B, out). A bias is initialized to zeros."""

    @abstractmethod
    def embedding(self, vocab_size: int, hidden_size: int, init: Init) -> nn.Module:
        """Vocabulary-parallel embedding: (S, B) tokens to (S/tp, B, D)."""

    @abstractmethod
    def experts(
        self, hidden_size: int, mixture: MoeShape, init: Init, init_out: Init, *, capacity_factor: float | None
    ) -> nn.Module:
        """Experts of a mixture-of-experts layer, (S/tp, B, D) to (S/tp, B, D).

        Further inputs are the weights and the indices of each token's experts, (S/tp, B, k). A second output is the
        number of token slots dropped beyond the capacity, () float32, or None without a capacity.
        """

    @abstractmethod
    def head(self, vocab_size: int, hidden_size: int, init: Init) -> Head:
        """Vocabulary-parallel output projection with its loss."""
