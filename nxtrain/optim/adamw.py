"""AdamW over this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nxtrain.backends.base import Kernels
from nxtrain.precision import Precision
from nxtrain.sharding import Layout


class AdamW:
    """Decoupled weight decay Adam.

    `fp32` updates float32 parameters in place. `fp32_master` updates float32 copies of narrower parameters and rounds
    them to nearest; the copies are state and are saved.

    Args:
        parameters: By name, as in the model.
        table: Tells which parameters decay.
        kernels: Where the arithmetic runs.
        put: Copies a host tensor to the device.
        update: The rule.
        betas, eps, weight_decay: As in Loshchilov and Hutter 2019 (arXiv:1711.05101).
    """

    def __init__(
        self,
        shards: Mapping[str, Tensor],
        layout: Layout,
        kernels: Kernels,
        put: Callable[[Tensor], Tensor],
        *,
        precision: Precision,
        seed: int,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self._parameters, self._kernels = shards, kernels
        self._betas, self._eps = betas, eps
        self._groups = [
            (names, weight_decay if decays else 0.0)
            for decays in (True, False)
            for names in kernels.batches([name for name in shards if layout.table[name].decay == decays])
        ]

        def zeros() -> dict[str, Tensor]:
            # Made on the host: on a lazy device each then has a buffer of its own, and the first step is like the rest.
            return {name: put(torch.zeros(p.shape, dtype=torch.float32)) for name, p in shards.items()}

        self.state: dict[str, dict[str, Tensor]] = {"exp_avg": zeros(), "exp_avg_sq": zeros()}
        if precision.update == "fp32_master":
            wide = {name: shard for name, shard in shards.items() if shard.dtype == torch.float32}
            self.state["master"] = wide or zeros()
            self.reset()
        self.num_updates = put(torch.zeros(2))
        """(2,) float32, the number of updates done, twice: a longer vector never becomes a constant of a graph."""

    @torch.no_grad()
    def reset(self) -> None:
        """Take the float32 copies from the parameters, after those were given new values."""
        for name, master in self.state.get("master", {}).items():
            if master is not self._parameters[name]:
                master.copy_(self._parameters[name])

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor], lr: Tensor, grad_scale: Tensor) -> None:
        """Update every parameter.

        Args:
            grads: Of the whole batch, by parameter name; may be overwritten.
            lr: () float32 on the device.
            grad_scale: () float32 on the device, multiplies the gradients.
        """
        self.num_updates.add_(1.0)
        masters: Mapping[str, Tensor] = self.state.get("master", self._parameters)
        for names, weight_decay in self._groups:
            self._kernels.adamw(
                [masters[name].detach() for name in names],
                [grads[name].to(torch.float32) for name in names],
                [self.state["exp_avg"][name] for name in names],
                [self.state["exp_avg_sq"][name] for name in names],
                lr=lr,
                step=self.num_updates[0],
                grad_scale=grad_scale,
                betas=self._betas,
                eps=self._eps,
                weight_decay=weight_decay,
            )
            if "master" in self.state:
                for name in names:
                    if self._parameters[name] is not self.state["master"][name]:
                        self._parameters[name].copy_(self.state["master"][name])
