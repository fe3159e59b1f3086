"""Interface of a kernel that computes the feed-forwards of all experts of a rank in blocks of rows.

Shapes: T tokens, D hidden, F intermediate of this rank, E experts, n blocks of B rows each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ExpertBlocks:
    """Blocks of rows, each of one expert.

    Args:
        tokens: (n * B,) integers, token of each row; T for a row without a token.
        owner: (n,) integers, expert of each block.
    """

    tokens: Tensor
    owner: Tensor

    @property
    def height(self) -> int:
        """Rows of a block."""
        return self.tokens.shape[0] // self.owner.shape[0]


class BlockwiseKernel(ABC):
    """Sums over the experts of each token: silu(gate) * up in blocks, times the weight of the token for the expert.

    The weight of an expert that a token does not pass through is 0.
    """

    @abstractmethod
    def height(self, num_slots: int, num_experts: int) -> int:
        """Choose the rows of a block for a number of slots that the experts compute at most."""

    @abstractmethod
    def products(
        self, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, blocks: ExpertBlocks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the sums, (T, D), and two tensors that `gradients` needs.

        Args:
            x: (T, D), tokens.
            weights: (T, E) float32, weight of each expert for each token.
            gate_up: (E * 2F, D).
            down: (D, E * F).
            blocks: Tokens and expert of each block.
        """

    @abstractmethod
    def gradients(  # 8 arguments: those of `products`, with the gradient of its result and what it has kept
        self,
        grad: Tensor,
        x: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        blocks: ExpertBlocks,
        kept: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute the gradients of the first four arguments of `products`.

        Args:
            grad: (T, D), gradient of the sums.
            kept: Tensors that `products` returned beside the sums.
        """
