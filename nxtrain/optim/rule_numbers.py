"""Weight decay and betas of each update, on the device: constants, or values of a schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from nxtrain.common.kernels import MeanDecay
from nxtrain.config.schema import OptimConfig
from nxtrain.optim.schedule import Schedule, rule_schedules

SMALLEST_BETA = 1e-30
"""Minimum beta in logarithms, since log(0) is infinite. After one update with this beta, the bias correction is 1."""


class RuleNumbers:
    """Weight decay and betas as functions of the update number.

    The scheduled values of all updates are a table on the device, indexed by the update number. The update number is a
    tensor in the optimizer state. So a resume is exact, a skipped update does not count, the host reads nothing, and
    graphs do not change.

    Args:
        optim: Keys of [optim].
        put: Copies a host tensor to the device.
    """

    def __init__(self, optim: OptimConfig, put: Callable[[Tensor], Tensor]) -> None:
        self._optim = optim
        schedules = rule_schedules(optim)
        self._tables: dict[str, Tensor] = {}
        if "weight_decay" in schedules or optim.weight_decay_schedule != "constant":
            divisor = 1.0
            if optim.weight_decay_schedule != "constant":
                divisor = optim.highest_lr
            decays = _values(schedules.get("weight_decay", Schedule.constant(optim.weight_decay)))
            self._tables["weight_decay"] = put(torch.tensor([[decay / divisor for decay in decays]]))
        of_betas = dict(zip(("beta1", "beta2"), optim.betas, strict=True))
        if not of_betas.keys() & schedules.keys():
            of_betas = {}
        for name, beta in {**of_betas, "muon_momentum": optim.muon_momentum}.items():
            if name in of_betas or name in schedules:
                # In float64: a rounded beta near 1 has few digits of 1 - beta.
                betas = _values(schedules.get(name, Schedule.constant(beta)))
                logs = [math.log(max(value, SMALLEST_BETA)) for value in betas]
                sums = [0.0, *accumulate(logs[1:])]  # no update has the value before the first
                self._tables[name] = put(torch.tensor([betas, [1.0 - value for value in betas], logs, sums]))

    def weight_decay(self, step: Tensor, lr: Tensor) -> float | Tensor:
        """Weight decay of an update, which the update multiplies by the learning rate.

        Args:
            step: Number of the update from 1, () float32 on the device.
            lr: Scheduled learning rate, () float32 on the device.
        """
        if "weight_decay" not in self._tables:
            return self._optim.weight_decay
        (decay,) = _row(self._tables["weight_decay"], step)
        if self._optim.weight_decay_schedule == "corrected":
            return decay * lr
        return decay

    def means(self, step: Tensor) -> tuple[MeanDecay, MeanDecay] | None:
        """Weights of AdamW's two moving averages in an update; None if both betas are constant.

        Args:
            step: As for `weight_decay`.
        """
        if "beta1" not in self._tables:
            return None
        return self._mean("beta1", step), self._mean("beta2", step)

    def momentum(self, step: Tensor) -> tuple[float | Tensor, float | Tensor]:
        """Weights of Muon's old momentum and of the new gradient in an update.

        Args:
            step: As for `weight_decay`.
        """
        if "muon_momentum" not in self._tables:
            return self._optim.muon_momentum, 1.0 - self._optim.muon_momentum
        mean = self._mean("muon_momentum", step)
        return mean.keep, mean.add

    def _mean(self, name: str, step: Tensor) -> MeanDecay:
        table = self._tables[name]
        keep, add, log, log_sum = _row(table, step)
        after = (step - (table.shape[1] - 1.0)).clamp(min=0.0)
        return MeanDecay(keep, add, (log_sum + after * log).expm1().neg())


def _values(schedule: Schedule) -> list[float]:
    """Scheduled values before the first update, and of every update; two equal values for a constant."""
    values = list(schedule.values())
    if len(values) == 1:  # XLA folds a table of one value into the graph as a constant
        return values * 2
    return values


def _row(table: Tensor, step: Tensor) -> tuple[Tensor, ...]:
    """Column of a table for an update number; the last column after the end of the table."""
    index = step.clamp(max=table.shape[1] - 1.0).to(torch.int32).view(1)
    return table.index_select(1, index).flatten().unbind()
