"""Meter of a run's throughput, and the record of a logged step.

The meter reads no device. Tokens are counted on the host, and the clock is an argument. On an asynchronous device, a
window ends when the trainer fetches metric values, for which the host waits until the steps of the window are done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

Clock = Callable[[], float]
"""Function that returns monotonic time in seconds."""


@dataclass(frozen=True)
class Throughput:
    """Training speed over one window of steps.

    Args:
        tokens: Positions of all rows since the first step of the run, over all starts, including positions without a
            target.
        tokens_per_s: Positions of the global batches of the window, per second.
        step_time_s: Mean seconds of a step.
        mfu: Model FLOPs utilization: FLOPs per second over the peak of all devices; None if the peak is unknown.
    """

    tokens: int
    tokens_per_s: float
    step_time_s: float
    mfu: float | None


@dataclass(frozen=True)
class Verdict:
    """Findings of the stability detectors, which are part of a step record.

    Args:
        skipped_steps: Number of steps since the previous record that updated nothing.
        alarm: Text of the alarms since the previous record; empty without an alarm.
        spikes: First step and length of each spike of the gradient norm that ended since the previous record.
        grad_norm_mean: Running mean of the gradient norm; None in the first steps of a run.
        grad_norm_lowest: Lowest running mean of any step so far.
        loss_scale: Scale of fp16 gradients; None for other types.
    """

    skipped_steps: tuple[int, ...] = ()
    alarm: str = ""
    spikes: tuple[tuple[int, int], ...] = ()
    grad_norm_mean: float | None = None
    grad_norm_lowest: float | None = None
    loss_scale: float | None = None


@dataclass(frozen=True)
class StepRecord:
    """Metrics of one logged step, one line of `metrics.jsonl`.

    Args:
        step: Number of finished updates, from 1.
        loss: Mean loss over the targets of the global batch, in nats.
        targets: Number of targets of the global batch that count in the loss; other positions are padding or masked.
        grad_norm: Global norm of the gradient before clipping.
        param_norm: Global norm of the parameters after the update.
        lost_update_frac: Share of the parameters whose update is lost when rounded to nearest.
        throughput: Speed since the previous record.
        z_loss: Mean z-loss, which `loss` does not include; None without train.z_loss.
        noise_scale: Running estimate of the gradient noise scale, in sequences; None if not measured.
        val_loss: Mean loss over the held-out tokens, in nats; None if this step was not evaluated.
        verdict: Findings of the stability detectors.
        measured: Values of the observers, such as `goodput`, and of the loader, such as tokens of each corpus.
    """

    step: int
    loss: float
    targets: int
    grad_norm: float
    param_norm: float
    lost_update_frac: float
    lr: float
    throughput: Throughput
    z_loss: float | None = None
    noise_scale: float | None = None
    val_loss: float | None = None
    verdict: Verdict = field(default_factory=Verdict)
    measured: Mapping[str, Any] = field(default_factory=dict)

    def line(self) -> dict[str, Any]:
        """Record as a flat dict. `mfu` is None if unknown; other optional values are absent if empty."""
        flat = asdict(self)
        flat |= flat.pop("throughput") | flat.pop("verdict") | flat.pop("measured")
        for key in (
            "z_loss",
            "noise_scale",
            "val_loss",
            "skipped_steps",
            "alarm",
            "grad_norm_mean",
            "grad_norm_lowest",
            "spikes",
            "loss_scale",
        ):
            if flat[key] in (None, (), ""):
                del flat[key]
        return flat


class ThroughputMeter:
    """Meter of the training speed, which counts tokens and steps between two readings.

    Args:
        flops_per_token: Model FLOPs per token of each step.
        peak_flops: Peak FLOPs per second of all devices; None if unknown.
        tokens: Tokens of earlier starts.
        ago_s: Seconds since the beginning of the first window.
        clock: Clock.
    """

    def __init__(
        self,
        flops_per_token: Callable[[int], int],
        peak_flops: float | None,
        *,
        tokens: int = 0,
        ago_s: float = 0.0,
        clock: Clock = time.monotonic,
    ) -> None:
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._clock = clock
        self._tokens = tokens
        self._open_window()
        self._begin_s -= ago_s

    def add_step(self, step: int, num_tokens: int) -> None:
        """Count one step over a global batch of `num_tokens` positions."""
        self._tokens += num_tokens
        self._flops += num_tokens * self._flops_per_token(step)
        self._num_steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context whose time is excluded from the window, for example for evaluations and checkpoints.

        Pause only while the device's queue is empty, such as after a fetch. Otherwise the time of queued work is
        excluded too.
        """
        begin = self._clock()
        try:
            yield
        finally:
            self._begin_s += self._clock() - begin

    def read(self) -> Throughput:
        """Speed since the last reading, over at least one step; a new window begins."""
        assert self._num_steps, "a window without a step has no speed"
        seconds = self._clock() - self._begin_s
        tokens_per_s = (self._tokens - self._begin_tokens) / seconds
        mfu = self._flops / seconds / self._peak_flops if self._peak_flops else None
        result = Throughput(self._tokens, tokens_per_s, seconds / self._num_steps, mfu)
        self._open_window()
        return result

    def _open_window(self) -> None:
        self._begin_s = self._clock()
        self._begin_tokens = self._tokens
        self._flops = 0
        self._num_steps = 0
