"""AdamW optimizer over this rank's shards, with float32 arithmetic for every parameter type."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from nxtrain.backends.rounding import step_hash
from nxtrain.backends.torch_kernels import constant_means, row_tiles
from nxtrain.common.kernels import AdamStep, Kernels, RoundingKey, Rows
from nxtrain.common.sharding import Layout
from nxtrain.config.schema import OptimConfig
from nxtrain.optim.host_copies import HostCopies
from nxtrain.optim.rounding import rounding_keys
from nxtrain.optim.rule_numbers import RuleNumbers
from nxtrain.optim.update_rules import Compensated, Copied, Elsewhere, InPlace, Nearest, ParamStorage, Stochastic
from nxtrain.parallel.precision import Precision

_MEANS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
EMA = "ema"

MARKED_ENTRIES = 1 << 24
"""Maximum number of entries whose lost updates are computed at once, to bound their float32 copies at 64 MiB each."""


@dataclass(frozen=True)
class _Tile:
    """Rows of a parameter, with the same rows of its moments."""

    rows: Rows
    param: ParamStorage
    exp_avg: ParamStorage
    exp_avg_sq: ParamStorage


class AdamW:
    """AdamW optimizer: Adam with decoupled weight decay, over this rank's shards.

    Attributes:
        state: Optimizer state in checkpoints, by kind and parameter name. `exp_avg` and `exp_avg_sq` are the moments.
            `master` has float32 master weights of `fp32_master`. `compensation` has the rounding errors of
            `bf16_kahan`. `momentum_buffer` is of Muon. `ema` is the float32 moving average of the weights of
            `optim.ema_decay`.
        num_updates: (2,) float32, the number of finished updates, stored twice, since torch-xla may fold a single
            number into a constant of a graph.

    Args:
        shards: Tensors that this rank updates, by parameter name.
        layout: Position of these entries in the model, and shard spec of each parameter.
        kernels: Kernels of the device.
        put: Copies a host tensor to the device.
        precision: Update rule, and types of the optimizer state.
        seed: Seed of the run, for stochastic rounding.
        optim: Keys of [optim]. The update follows Loshchilov and Hutter 2019 (arXiv:1711.05101), with the schedules of
            `RuleNumbers`.
        apart: The parameters are on another device than the state and the update.
        others: Parameters that a subclass updates with a single moment; None for none.
        host_copies: Copies of the parameters in host memory, for a state in host memory; None without offloading.
    """

    def __init__(  # 10 arguments: kernels, and both places of what they update
        self,
        shards: Mapping[str, Tensor],
        layout: Layout,
        kernels: Kernels,
        put: Callable[[Tensor], Tensor],
        *,
        precision: Precision,
        seed: int,
        optim: OptimConfig,
        apart: bool = False,
        others: Collection[str] | None = None,
        host_copies: HostCopies | None = None,
    ) -> None:
        self._apart, self._host_copies = apart, host_copies
        self._updated = shards if host_copies is None else host_copies.params
        self._shards = shards
        self._layout = layout
        self._kernels = kernels
        self._precision = precision
        self._betas = optim.betas
        self._eps = optim.eps
        self._numbers = RuleNumbers(optim, put)
        # Made on the host: on a lazy device each tensor then has a buffer of its own, and the first step's graph is
        # that of all steps.
        self.num_updates = put(torch.zeros(2))
        zeros = partial(_zeros, put=put, device=self.num_updates.device if kernels.makes_zeros else None)
        own = {name: shard for name, shard in shards.items() if name not in (others or ())}
        self.state = {kind: zeros(own, precision.state) for kind in _MEANS}
        if others is not None:
            self.state[MOMENTUM] = zeros({name: shards[name] for name in others}, precision.state)
        means = tuple(self.state)
        if precision.update == "fp32_master":
            stored_wide = all(shard.dtype == torch.float32 for shard in shards.values())
            self.state["master"] = dict(shards) if stored_wide else zeros(shards, torch.float32)
        if precision.update == "bf16_kahan":
            self.state["compensation"] = zeros(shards, torch.bfloat16)
        self._ema_decay = optim.ema_decay
        self._keys: dict[str, dict[str, RoundingKey]] = {}
        if precision.update == "bf16_stochastic":
            rounded = ("param", *means) if precision.state == torch.bfloat16 else ("param",)
            self._keys = {kind: rounding_keys(layout, shards, kind, seed, put) for kind in rounded}
        self._groups = []
        for decays in (True, False):
            shapes = {name: shard.shape for name, shard in own.items() if layout.table[name].decay == decays}
            self._groups += [(self._tiles(call), decays) for call in kernels.tiles(shapes)]
        in_graph = not apart and not (self._keys and kernels.rounds_on_host)
        self._update = kernels.fuse(self._update_tiles, any_size=True) if in_graph else self._update_tiles
        self.reset()
        if optim.ema_decay:  # by way of the host, so that each has a buffer of its own
            first = {name: shard.detach().cpu().to(torch.float32, copy=True) for name, shard in shards.items()}
            self.state[EMA] = {name: put(weights) for name, weights in first.items()}

    @torch.no_grad()
    def _tiles(self, call: Sequence[Rows]) -> list[_Tile]:
        """Tiles for one call of the update kernel, as views without gradients."""
        return [
            _Tile(rows, self._param(rows), self._mean("exp_avg", rows), self._mean("exp_avg_sq", rows)) for rows in call
        ]

    @torch.no_grad()
    def reset(self) -> None:
        """Reset master weights, compensation and the moving average of the weights to new parameter values."""
        for name, master in self.state.get("master", {}).items():
            if master is not self._shards[name]:
                master.copy_(self._shards[name])
        for lost in self.state.get("compensation", {}).values():
            lost.zero_()
        for name, mean in self.state.get(EMA, {}).items():
            mean.copy_(self._shards[name])

    @torch.no_grad()
    def step(self, grads: Mapping[str, Tensor], lr: Tensor, grad_scale: Tensor, skip: Tensor | None = None) -> None:
        """Apply one update to every parameter.

        Args:
            grads: Gradients of the whole batch, by parameter name; may be overwritten.
            lr: Learning rate, () float32 on the device.
            grad_scale: Factor of the gradients, () float32.
            skip: () bool; True leaves parameters and state unchanged, bit for bit. None never skips.
        """
        # The state may be kept in host memory.
        lr, grad_scale = lr.to(self.num_updates.device), grad_scale.to(self.num_updates.device)
        if skip is None or self._precision.params != torch.float16:
            self.num_updates.add_(1.0)
        else:  # the first scales overflow by design: such a step is none
            self.num_updates.add_((~skip).float().to(self.num_updates.device))
        if skip is not None and self._kernels.host_reads_are_free:
            if skip.item():
                return
            skip = None
        step = self.num_updates[0]
        skip = None if skip is None else skip.to(step.device)
        decay, means = self._numbers.weight_decay(step, lr), self._numbers.means(step)
        how = AdamStep(lr, step, grad_scale, self._betas, self._eps, decay, skip, means)
        if self._host_copies is None:
            self._step(grads, how)
        else:
            masters = self.state.get("master", {})
            read = [name for name, x in self._shards.items() if x.dtype == torch.float32 or name not in masters]
            self._step(self._host_copies.fetch(grads, read), how)
            self._host_copies.send()
        if self._ema_decay:
            self._average(step, skip)

    def _average(self, step: Tensor, skip: Tensor | None) -> None:
        """Update the moving average of the weights; in the first steps, it is the plain mean of all steps.

        Args:
            step: Number of the update from 1, () float32.
            skip: As for `AdamW.step`.
        """
        decay = ((step - 1.0) / step.clamp(min=1.0)).clamp(max=self._ema_decay)
        weights = self.state.get("master", self._updated)
        for name, mean in self.state[EMA].items():
            # Products and sums alone round an entry alike in every layout.
            new = mean * decay + weights[name].to(mean.device).float() * (1.0 - decay)
            mean.copy_(new if skip is None else torch.where(skip, mean, new))

    def _step(self, grads: Mapping[str, Tensor], how: AdamStep) -> None:
        """Update every parameter on the device of the gradients."""
        noise = step_hash(how.step) if self._keys else how.step
        for tiles, decays in self._groups:
            parts = [tile.rows.of(grads[tile.rows.name]).to(how.step.device) for tile in tiles]
            weight_decay = how.weight_decay if decays else 0.0
            self._update(tiles, parts, replace(how, weight_decay=weight_decay), noise)

    def _update_tiles(self, tiles: Sequence[_Tile], grads: Sequence[Tensor], how: AdamStep, noise: Tensor) -> None:
        """Update the rows of tiles with their gradients; `noise` is the hash of the step for stochastic rounding."""
        params = [tile.param.open() for tile in tiles]
        exp_avgs = [tile.exp_avg.open() for tile in tiles]
        exp_avg_sqs = [tile.exp_avg_sq.open() for tile in tiles]
        self._kernels.adamw(params, [grad.float() for grad in grads], exp_avgs, exp_avg_sqs, how)
        for part, tensors in (("param", params), ("exp_avg", exp_avgs), ("exp_avg_sq", exp_avg_sqs)):
            for tile, wide in zip(tiles, tensors, strict=True):
                getattr(tile, part).close(wide, noise, how.skip)

    @torch.no_grad()
    def lost_updates(self, lr: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Mark the entries that the last update would not have changed under rounding to nearest.

        Args:
            lr: Learning rate of the last update, () float32 on the device.

        Yields:
            Parameter name, and a float32 tensor in the shard's shape. An entry is 1 if its nonzero update is lost by
            rounding to the parameters' type, otherwise 0.

        Source: Yu et al. 2024 (arXiv:2405.03637), lost arithmetic.
        """
        lr = lr.to(self.num_updates.device)
        for name, direction in self._directions():
            shard, rate = self._shards[name], self._rate_of(name, lr)
            weight_decay = self._weight_decay_of(name, lr)
            marks = torch.zeros(shard.shape, device=shard.device)
            for rows in row_tiles({name: shard.shape}, MARKED_ENTRIES):
                update = direction(rows)
                param = rows.of(shard).to(update.device, self._precision.params)
                if self._layout.table[name].decay:
                    update.add_(param * weight_decay)
                update.mul_(rate)
                unchanged = (param.float() - update).to(param.dtype) == param
                rows.of(marks).copy_(unchanged & (update != 0))
            yield name, marks

    def _directions(self) -> Iterator[tuple[str, Callable[[Rows], Tensor]]]:
        """Functions that recompute the last update of some rows of a parameter, by parameter name, in layout order.

        Updates are in float32, without learning rate and weight decay, and may be overwritten.
        """
        step = self.num_updates[0]
        first, second = self._numbers.means(step) or constant_means(self._betas, step)

        def direction(rows: Rows) -> Tensor:
            mean, mean_sq = (rows.of(self.state[kind][rows.name]).float() for kind in _MEANS)
            return (mean / first.correction).div_((mean_sq / second.correction).sqrt_().add_(self._eps))

        for name in self.state[_MEANS[0]]:
            yield name, direction

    def _rate_of(self, name: str, lr: Tensor) -> Tensor:
        """Learning rate of a parameter, given the scheduled learning rate."""
        return lr

    def _weight_decay_of(self, name: str, lr: Tensor) -> float | Tensor:
        """Weight decay of a parameter in the last update, given the scheduled learning rate."""
        return self._numbers.weight_decay(self.num_updates[0], lr)

    def _param(self, rows: Rows) -> ParamStorage:
        value = rows.of(self._updated[rows.name])
        if self._precision.update == "fp32_master" and value.dtype != torch.float32:
            return Copied(value, rows.of(self.state["master"][rows.name]))
        if self._apart:
            return Elsewhere(value, self.num_updates.device, lambda here: self._stored(here, rows))
        return self._stored(value, rows)

    def _stored(self, value: Tensor, rows: Rows) -> ParamStorage:
        """Storage of a parameter that has no master copy."""
        if self._precision.update == "bf16_stochastic":
            return self._stochastic("param", value, rows)
        if self._precision.update == "bf16_kahan":
            return Compensated(value, rows.of(self.state["compensation"][rows.name]), self._kernels.replace)
        return InPlace(value)

    def _mean(self, kind: str, rows: Rows) -> ParamStorage:
        value = rows.of(self.state[kind][rows.name])
        if value.dtype == torch.float32:
            return InPlace(value)
        return self._stochastic(kind, value, rows) if kind in self._keys else Nearest(value)

    def _stochastic(self, kind: str, value: Tensor, rows: Rows) -> Stochastic:
        key = self._keys[kind][rows.name].narrow(rows.start, rows.number)
        return Stochastic(value, key, self._kernels.stochastic_round)


def _zeros(
    shards: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    put: Callable[[Tensor], Tensor],
    device: torch.device | None,
) -> dict[str, Tensor]:
    """Zero tensors in the shapes of shards, on a given device; None for the device of each shard."""
    if device is not None:
        return {name: torch.zeros(shard.shape, dtype=dtype, device=device) for name, shard in shards.items()}
    return {name: put(torch.zeros(shard.shape, dtype=dtype)) for name, shard in shards.items()}
