"""Texts of a run's status line: step, loss, speed and remaining time, then the other metrics of a record."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from nxtrain.common.batch_sizes import BatchSizes
from nxtrain.common.text import short
from nxtrain.metrics.meters import Clock

KINDS_S = ("data_s", "training_s", "waiting_s", "vote_s", "log_s", "evaluation_s", "checkpoint_s")
"""Record keys of the host's seconds by kind of work."""

SECTIONS_S = ("forward_s", "backward_s", "reduce_s", "optimizer_s")
"""Record keys of the seconds of step sections, which are parts of `training_s`."""


PREFERENCES = ("reward_margin", "reward_accuracy", "reward_chosen", "reward_rejected", "kl")
"""Record keys of a preference objective: rewards, reward margin, accuracy, and divergence from the reference."""


class Status:
    """Texts of the status line for the newest record of a run, with its elapsed and estimated remaining time.

    Pauses are part of the time. The first step only starts the measurement, since its compilation and warm-up do not
    recur.

    Args:
        total_steps: Steps of the run.
        sizes: Global batch size of each step, to which its time is proportional.
        clock: Clock.
    """

    def __init__(self, total_steps: int, sizes: BatchSizes, clock: Clock = time.monotonic) -> None:
        self._total_steps, self._sizes = total_steps, sizes
        self._clock = clock
        self._start_s = clock()
        self._first: tuple[int, float] | None = None
        self._val_loss: float | None = None

    def elapsed_s(self) -> float:
        """Seconds since this process began to train."""
        return self._clock() - self._start_s

    def eta_s(self, step: int) -> float | None:
        """Seconds until the last step; None until two steps were measured."""
        now = self._clock()
        first_step, first_s = self._first = self._first or (step, now)
        if step == first_step:
            return None
        left = self._sizes.before(self._total_steps) - self._sizes.before(step)
        return left * (now - first_s) / (self._sizes.before(step) - self._sizes.before(first_step))

    def read(self, record: Mapping[str, Any]) -> tuple[int, list[str], str]:
        """Step, texts of values and remaining time of a record. The last held-out loss is shown until the next."""
        step = int(record["step"] or 0)
        self._val_loss = record.get("val_loss", self._val_loss)
        values = [f"loss {record['loss']:.4f}"]
        if self._val_loss is not None:
            values.append(f"val {self._val_loss:.4f}")
        values.append(f"{short(record['tokens_per_s'] or 0.0)} tokens/s")
        left = ""
        eta_s = self.eta_s(step)
        if eta_s is not None:
            left = f"{duration(eta_s)} left"
        return step, values, left


def details(record: Mapping[str, Any]) -> list[str]:
    """Texts of a record's other metrics, the most important first; absent metrics are left out."""
    numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
    spent_s = sum(numbers.get(key, 0.0) for key in KINDS_S)
    texts = []
    if "reward_margin" in numbers:
        texts.append(f"margin {numbers['reward_margin']:.3g}")
    if "reward_accuracy" in numbers:
        texts.append(f"accuracy {numbers['reward_accuracy']:.0%}")
    if {"expert_load_min", "expert_load_max"} <= numbers.keys():
        texts.append(f"expert load {numbers['expert_load_min']:.2f} to {numbers['expert_load_max']:.2f}")
    if numbers.get("dropped_share"):
        texts.append(f"dropped {numbers['dropped_share']:.1%}")
    if "mfu" in numbers:
        texts.append(f"MFU {numbers['mfu']:.1%}")
    if "grad_norm" in numbers:
        texts.append(f"grad norm {numbers['grad_norm']:.3g}")
    shares = {}
    if spent_s > 0:
        shares = _shares(numbers, spent_s)
        texts.append(f"data {shares.pop('data')}%")
    if "peak_memory_bytes" in numbers:
        texts.append(f"{numbers['peak_memory_bytes'] / (1 << 30):.1f} GiB")
    if "saved_step" in numbers:
        texts.append(f"saved {numbers['saved_step']:.0f}")
    if "goodput" in numbers:
        texts.append(f"goodput {numbers['goodput']:.0%}")
    if spent_s > 0 and any(key in numbers for key in SECTIONS_S):
        texts.append(" ".join(f"{name} {share}%" for name, share in shares.items()))
    return texts


def _shares(numbers: Mapping[str, float], spent_s: float) -> dict[str, int]:
    """Percentage of the time by kind of work, as differences of rounded sums, so that the total is 100."""
    seconds = {"data": numbers.get("data_s", 0.0)}
    seconds |= {key[:-2]: numbers[key] for key in SECTIONS_S if key in numbers}
    seconds["waiting for ranks"] = numbers.get("waiting_s", 0.0)
    shares: dict[str, int] = {}
    total_s = 0.0
    whole = 0
    for name, kind_s in seconds.items():
        total_s += kind_s
        shares[name] = round(100 * total_s / spent_s) - whole
        whole += shares[name]
    return {**shares, "other work": 100 - whole}


def fitting(texts: Iterable[str], columns: int) -> str:
    """Join the texts that fit into a number of columns, in order, each after two blanks."""
    text = ""
    for detail in texts:
        if len(text) + 2 + len(detail) > columns:
            break
        text += f"  {detail}"
    return text


def duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))
