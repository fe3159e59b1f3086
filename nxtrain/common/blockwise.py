"""Interface of a kernel for mixture-of-experts layers: it computes the feed-forwards of a rank's experts in row blocks.

Shapes: T tokens, D hidden size, F intermediate size on this rank, E experts, n blocks of B rows each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ExpertBlocks:
    """Assignment of tokens to blocks of rows, where all rows of a block belong to one expert.

    Args:
        tokens: (n * B,) integers, the token index of each row; T marks a padding row.
        owner: (n,) integers, the expert index of each block.
    """

    tokens: Tensor
    owner: Tensor

    @property
    def height(self) -> int:
        """Number of rows in a block."""
        return self.tokens.shape[0] // self.owner.shape[0]


class BlockwiseKernel(ABC):
    """Kernel that computes a mixture-of-experts feed-forward in blocks of rows.

    The output of a token is the sum over experts of the router weight times the expert's down(silu(gate) * up). The
    router weight is 0 for an expert to which a token is not routed.
    """

    @abstractmethod
    def height(self, num_slots: int, num_experts: int) -> int:
        """Choose the number of rows per block.

        Args:
            num_slots: Most (token, expert) pairs that the experts of this rank compute.
            num_experts: Experts of this rank.
        """

    @abstractmethod
    def products(
        self, x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, blocks: ExpertBlocks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the weighted sum of expert outputs for each token, (T, D), and two tensors that `gradients` needs.

        Args:
            x: (T, D), tokens.
            weights: (T, E) float32, router weight of each expert for each token.
            gate_up: (E * 2F, D), gate and up matrices of all experts.
            down: (D, E * F), down matrices of all experts.
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
        """Compute the gradients of `x`, `weights`, `gate_up` and `down`, the first four arguments of `products`.

        Args:
            grad: (T, D), gradient of the weighted sums.
            kept: The two further tensors that `products` returned.
        """
