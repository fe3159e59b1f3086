"""Muon optimizer for the matrices of the blocks, by Newton-Schulz orthogonalization of momentum; AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from nxtrain.backends.rounding import step_hash
from nxtrain.common.kernels import AdamStep, Kernels, Rows
from nxtrain.common.sharding import Layout
from nxtrain.config.schema import OptimConfig
from nxtrain.optim.adamw import MOMENTUM, AdamW
from nxtrain.optim.newton_schulz import orthogonalize, update_scale
from nxtrain.optim.update_rules import ParamStorage
from nxtrain.parallel.matrix_rounds import Round
from nxtrain.parallel.precision import DTYPES, Precision
from nxtrain.parallel.whole_matrices import WholeMatrices


class Muon(AdamW):
    """Muon optimizer for the matrices of the blocks, with AdamW for all other parameters.

    Muon sets all singular values of the momentum to nearly one. Each rank keeps the momentum of its own rows. Each
    matrix is orthogonalized on one rank, whole and in float32, so that equal gradients give equal weights in every
    layout. The segments of a fused matrix are separate matrices.

    Args:
        shards: Tensors that this rank updates, by parameter name.
        layout: Position of these entries in the model, and shard spec of each parameter.
        kernels: Kernels of the device.
        put: Copies a host tensor to the device.
        matrices: Exchange of the rows of the matrices that Muon updates.
        precision: Update rule, and types of the optimizer state, which includes the momentum.
        seed: Seed of the run, for stochastic rounding.
        optim: Keys of [optim].
        apart: The parameters are on another device than the state and the update.

    Source: Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon); Liu et al. 2025 (arXiv:2502.16982); torch
    2.9, torch.optim.Muon.
    """

    def __init__(  # 9 arguments: those of AdamW, and the exchange
        self,
        shards: Mapping[str, Tensor],
        layout: Layout,
        kernels: Kernels,
        put: Callable[[Tensor], Tensor],
        matrices: WholeMatrices,
        *,
        precision: Precision,
        seed: int,
        optim: OptimConfig,
        apart: bool = False,
    ) -> None:
        names = list(chain.from_iterable(round_.names for round_ in matrices.rounds))
        super().__init__(
            shards, layout, kernels, put, precision=precision, seed=seed, optim=optim, others=names, apart=apart
        )
        self._matrices, self._optim = matrices, optim
        self._dtype = DTYPES[optim.muon_precision]
        self._adam_factor = optim.adam_lr / optim.lr if optim.adam_lr else 1.0
        self._adam_decay_factor = 1.0
        if optim.weight_decay_schedule == "decoupled":  # the decay is the same whatever rate an update multiplies it by
            self._adam_decay_factor = 1.0 / self._adam_factor
        self._stores: dict[str, tuple[ParamStorage, ParamStorage]] = {}
        for name in names:
            rows = Rows(name, 0, shards[name].shape[0], whole=True)
            self._stores[name] = self._param(rows), self._mean(MOMENTUM, rows)

    def _step(self, grads: Mapping[str, Tensor], how: AdamStep) -> None:
        of_adam = how.weight_decay * self._adam_decay_factor
        super()._step(grads, replace(how, lr=how.lr * self._adam_factor, weight_decay=of_adam))
        noise, momentum = step_hash(how.step), self._numbers.momentum(how.step)
        for round_ in self._matrices.rounds:  # one after another, since only one round needs memory at a time
            here = {name: grads[name].to(noise.device) for name in round_.names}
            ahead = {name: self._advance(name, grad, noise, momentum, how) for name, grad in here.items()}
            for name, update in self._orthogonalized(round_, ahead).items():
                store = self._stores[name][0]
                decay = how.weight_decay if self._layout.table[name].decay else 0.0
                old = store.open()
                _close(store, old, old * (1.0 - how.lr * decay) - update * how.lr, noise, how.skip)

    def _advance(
        self, name: str, grad: Tensor, noise: Tensor, momentum: tuple[float | Tensor, float | Tensor], how: AdamStep
    ) -> Tensor:
        """Update the momentum with a gradient; return the update before orthogonalization, in float32."""
        # Products and sums alone, which round each entry alike wherever the entry lies in a tensor.
        store, (keep, add) = self._stores[name][1], momentum
        old = store.open()
        new = grad.float() * how.grad_scale * add
        mean = old * keep + new
        _close(store, old, mean, noise, how.skip)
        if self._optim.muon_nesterov:
            return new + mean * keep
        return mean

    def _orthogonalized(self, round_: Round, rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Updates of this rank's rows, from whole matrices that are orthogonalized and scaled by their shape."""
        optim = self._optim

        def update(matrix: Tensor) -> Tensor:
            num_rows, num_columns = matrix.shape
            scale = update_scale(num_rows, num_columns, optim.muon_scale)
            return orthogonalize(matrix, optim.muon_steps, self._dtype) * scale

        return self._matrices.apply(round_, rows, update)

    def _directions(self) -> Iterator[tuple[str, Callable[[Rows], Tensor]]]:
        # The last gradient is gone, so that the momentum stands for the update.
        updates: dict[str, Tensor] = {}
        for round_ in self._matrices.rounds:
            momenta = {name: self.state[MOMENTUM][name].float() for name in round_.names}
            updates.update(self._orthogonalized(round_, momenta))
        others = dict(super()._directions())
        for name in self._shards:
            yield name, others.get(name, lambda rows: rows.of(updates[rows.name]))

    def _rate_of(self, name: str, lr: Tensor) -> Tensor:
        return lr if name in self._stores else lr * self._adam_factor

    def _weight_decay_of(self, name: str, lr: Tensor) -> float | Tensor:
        decay = super()._weight_decay_of(name, lr)
        return decay if name in self._stores else decay * self._adam_decay_factor


def _close(store: ParamStorage, wide: Tensor, new: Tensor, noise: Tensor, skip: Tensor | None) -> None:
    """Store a new value through a `ParamStorage`, unless the step is skipped.

    Args:
        wide: Result of `store.open()`, which may be the stored tensor itself.
    """
    store.close(wide.copy_(new if skip is None else torch.where(skip, wide, new)), noise, skip)
