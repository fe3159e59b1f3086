"""Gradient noise scale: the batch size above which more sequences per step gain little.

Each data parallel rank's gradient is the gradient of a small batch, and the mean over ranks is the gradient of the
global batch. The two norms together estimate the norm of the true gradient and the variance of a token's gradient. No
further forward or backward pass is needed.

Source: McCandlish et al. 2018 (arXiv:1812.06162), appendix A.1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from nxtrain.common.distributed.collectives import Collectives
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import Layout, ShardSpec

DECAY = 0.98
"""Decay of the running means of the noise scale's two estimates, which are noisy in a single step."""


class NoiseScale:
    """Estimate of the gradient noise scale, from running means of the squared gradient norm and the gradient variance.

    The running means are on the device. Both norms exclude parameters whose gradients are partial on a rank before sums
    over tp or pp.

    Args:
        layout: The entries that this rank updates.
        comm: Collectives.
        put: Copies a host tensor to the device.
        kernels: Kernels of the device.
        seq_len: Tokens of a sequence.
    """

    def __init__(
        self, layout: Layout, comm: Collectives, put: Callable[[Tensor], Tensor], kernels: Kernels, seq_len: int
    ) -> None:
        mesh = layout.mesh
        self._comm = comm
        self._kernels = kernels
        self._seq_len = seq_len
        self._world, self._dp = mesh.over("pp", "dp", "tp"), mesh.dp
        self._copies = mesh.dp.size // mesh.shard.size
        # Tensors, not numbers: every rank must record the same graph. A scalar could be a constant of the graph.
        self._weights = {name: put(torch.tensor([_weight(layout.table[name], mesh.tp)])) for name in layout}
        self._local = put(torch.zeros(1))
        self.means = put(torch.zeros(2))

    @torch.no_grad()
    def note(self, names: Sequence[str], grads: Sequence[Tensor]) -> None:
        """Add the squared norm of this rank's gradients, before the gradients are averaged over dp."""
        self._local.add_(self._squares(dict(zip(names, grads, strict=True))))

    @torch.no_grad()
    def add(self, grads: Mapping[str, Tensor], per_token: Tensor, num_positions: Tensor, skip: Tensor) -> None:
        """Update the running means with the gradients of a step.

        Args:
            grads: Averages over dp of the gradients, as this rank's shards.
            per_token: Factor that makes the gradient of a token's mean loss of them, () float32.
            num_positions: Positions in the rows of the global batch, with and without a target, () float32.
            skip: () bool, True for a step that is not finite and does not count.
        """
        both = torch.cat([self._local, self._squares(grads)])
        self._local.zero_()
        local, total = (self._comm.all_reduce(both, self._world) * per_token.square()).unbind()
        small, large = local / self._dp.size, total / self._copies
        variance = (small - large) * num_positions / (self._dp.size - 1)
        norm = (self._dp.size * large - small) / (self._dp.size - 1)
        means = DECAY * self.means + (1.0 - DECAY) * torch.stack([variance, norm])
        self.means.copy_(torch.where(skip, self.means, means))

    def value(self) -> Tensor:
        """Gradient noise scale in sequences: () float32."""
        return self.means[0] / self.means[1] / self._seq_len

    def _squares(self, grads: Mapping[str, Tensor]) -> Tensor:
        sums = []
        for name, grad in grads.items():
            rows = grad.flatten(1) if grad.dim() > 1 else grad.unsqueeze(0)
            sums.append(self._kernels.row_square_sums(rows).sum() * self._weights[name])
        if not sums:  # a stage may have frozen parameters alone
            return torch.zeros_like(self._local)
        return torch.cat(sums).sum(dim=0, keepdim=True)


def _weight(spec: ShardSpec, tp: Axis) -> float:
    """Weight of a parameter's squares in the gradient norm: 1 / (its copies over tp), or 0 to exclude the parameter."""
    copies = {piece.copies for piece in spec.pieces(tp)}
    if spec.is_tied or (tp.size > 1 and spec.partial_gradient):
        return 0.0
    if spec.dim is None:
        return 1.0 / copies.pop()
    return float(copies == {1})
