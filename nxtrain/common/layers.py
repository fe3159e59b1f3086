"""Contract of the layers that are sharded over tp: nxtrain's layers, or the layers of a vendor's library.

Models are built from these layers alone. A layer has the same parameters, by name, shape and `ShardSpec`, in every set.
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
    """Interface of the output projection, with a loss that never computes all logits at once.

    Attributes:
        scale: Factor of the gradients of the loss, () float32; None: 1.
    """

    weight: nn.Parameter
    specs: dict[str, ShardSpec]
    scale: Callable[[], Tensor] | None

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy: (S/tp, B, D), (S, B) to the sum over tokens, (), or to one of each token, (S, B)."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits on every rank: (S/tp, B, D) to (S, B, vocab_size) float32; not differentiable."""
        ...


class ContextAttention(ABC):
    """Attention between ranks that share the positions of each sequence.

    Attributes:
        positions: Positions of this rank on the host, ascending: (S,) int64.
    """

    positions: Tensor

    @abstractmethod
    def learn(self, uploaded: Tensor, starts: Tensor) -> None:
        """Register the documents of whole sequences, which every rank has read, before attention to them.

        Args:
            uploaded: (B, S) `starts` at the positions of this rank, on the device. The note ends with this tensor.
            starts: First position of each position's document, for all positions of the same rows, on the host.
        """

    @abstractmethod
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, starts: Tensor | None, window: int | None = None
    ) -> Tensor:
        """Attention of this rank's queries to the keys of all ranks: (S, B, N, H), (S, B, K, H) twice to (S, B, N, H).

        Args:
            q, k, v: Queries, keys and values at the positions of this rank.
            positions: (S,) int64, the positions on the device: data, so that the graphs of all ranks are equal.
            starts: (B, S) int64, first position of each position's document; None: a row is one document.
            window: Most positions that a query sees, its own among them; None: no limit.
        """


class RingAttention(ABC):
    """Kernel of causal attention between ranks that share the positions of each sequence."""

    @abstractmethod
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output of this rank's queries, and what the backward pass needs: (T, B, N, H), (T, B, K, H) twice."""

    @abstractmethod
    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of this rank's queries, keys and values, from the gradient of the output."""


class RouterLosses(ABC):
    """Losses of the routers of a model with experts."""

    @abstractmethod
    def add_to(
        self, loss: Tensor, routing: Tensor, targets: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Add the routers' losses to a loss, for the gradient alone: the value of the loss stays.

        Args:
            loss: (), sum of this rank's cross entropies.
            routing: (2E + 4,) float32, statistics of the routing over all layers.
            targets: (S, B) integers; `IGNORE_INDEX` does not count.
            scale: Factor of the gradients, () float32; None: 1.

        Returns:
            The loss, and in training the measures of `CausalLM.routing`.
        """


class LayerSet(ABC):
    """Maker of the layers that are sharded over tp, for one rank; on plain collectives or on a vendor's layers.

    All sets give their parameters the same names, shapes and `ShardSpec`s.

    Attributes:
        sequence_parallel: Between these layers, activations are sharded along the sequence, (S / tp, B, D).
    """

    tp: Axis
    sequence_parallel: bool

    @abstractmethod
    def column(self, in_features: int, segments: tuple[Segment, ...], init: Init, *, bias: bool = False) -> nn.Module:
        """Column layer: (S/tp, B, in) to (S, B, out/tp), the segments one after the other; a bias starts as zeros."""

    @abstractmethod
    def row(self, in_features: int, out_features: int, init: Init, *, bias: bool = False) -> nn.Module:
        """Row layer: (S, B, in/tp) to (S/tp, B, out); a bias starts as zeros."""

    @abstractmethod
    def embedding(self, vocab_size: int, hidden_size: int, init: Init) -> nn.Module:
        """Vocabulary embedding: (S, B) tokens to (S/tp, B, D)."""

    @abstractmethod
    def experts(
        self, hidden_size: int, mixture: MoeShape, init: Init, init_out: Init, *, capacity_factor: float | None
    ) -> nn.Module:
        """Experts: (S/tp, B, D), with weights and indices of each token's experts, (S/tp, B, k), to (S/tp, B, D).

        With the output comes the number of slots beyond the capacity, () float32, or None without a capacity.
        """

    @abstractmethod
    def head(self, vocab_size: int, hidden_size: int, init: Init) -> Head:
        """Output projection and loss."""
