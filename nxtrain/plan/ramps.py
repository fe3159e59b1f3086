"""Parts of a run whose global batch or sequences grow: updates, tokens, time and operations of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nxtrain.common.batch_sizes import spans
from nxtrain.config.batch_ramp import seq_lengths
from nxtrain.plan.job import Job
from nxtrain.plan.speed import StepTime, step_time
from nxtrain.plan.work import model_flops_per_token

FOREVER = 1 << 50
"""Updates beyond the end of every ramp and of every run."""


@dataclass(frozen=True)
class RampPart:
    """Adjacent updates of the same size.

    Args:
        job: The run with the global batch and the sequence length of these updates.
        steps: Number of updates.
        time: Time of an update.
    """

    job: Job
    steps: int
    time: StepTime

    @property
    def tokens(self) -> int:
        """Tokens of these updates."""
        return self.steps * self.job.tokens_per_step

    @property
    def seconds(self) -> float:
        """Time of these updates."""
        return self.steps * self.time.step_s

    @property
    def flops(self) -> float:
        """Operations of forward and backward passes, without recomputation."""
        return float(self.tokens) * model_flops_per_token(self.job)

    def to_json(self) -> dict[str, Any]:
        """The part as JSON."""
        return {
            "steps": self.steps,
            "global_batch": self.job.config.train.global_batch,
            "seq_len": self.job.sequence_len,
            "tokens": self.tokens,
            "step_time_s": self.time.step_s,
            "mfu": self.time.mfu,
            "flops_per_token": model_flops_per_token(self.job),
        }


def ramp_parts(job: Job, steps: int) -> tuple[RampPart, ...]:
    """Parts of a run of so many updates, in order; none without a ramp."""
    train = job.config.train
    if not train.batch_ramp and not train.seq_ramp:
        return ()
    sizes = train.batch_sizes()
    parts = []
    for span in spans(steps, sizes, seq_lengths(train.seq_ramp, train.seq_len, sizes)):
        config = job.config.model_copy(update={"train": train.model_copy(update={"global_batch": span.global_batch})})
        of_span = replace(job, config=config, shorter_len=span.seq_len)
        parts.append(RampPart(of_span, span.steps, step_time(of_span)))
    return tuple(parts)


def tokens_within(job: Job, limit_s: float, tokens_per_s: float) -> float:
    """Tokens of a run that ends after a time, at the speed of each part of its ramps.

    Args:
        job: The run.
        limit_s: Seconds that the run may take.
        tokens_per_s: Speed without a ramp, and after it.
    """
    tokens, left_s = 0.0, limit_s
    for part in ramp_parts(job, FOREVER):
        part_s = min(part.seconds, left_s)
        tokens += part_s / part.time.step_s * part.job.tokens_per_step
        left_s -= part_s
    return tokens + left_s * tokens_per_s
