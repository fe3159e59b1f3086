"""Parts of a run with a ramp of global batch or sequence length: updates, tokens, time and operations of each part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from nxtrain.common.batch_sizes import spans
from nxtrain.config.batch_ramp import seq_lengths
from nxtrain.plan.job import Job
from nxtrain.plan.speed import StepTime, step_time
from nxtrain.plan.work import model_flops_per_token

FOREVER = 1 << 50
"""Number of updates beyond the end of any ramp and any run."""


@dataclass(frozen=True)
class RampPart:
    """Part of a run with a ramp: adjacent updates with equal global batch and sequence length.

    Args:
        job: The run with the global batch and the sequence length of this part.
        steps: Number of updates.
        time: Time of an update.
    """

    job: Job
    steps: int
    time: StepTime

    @property
    def tokens(self) -> int:
        """Number of tokens of the part's updates."""
        return self.steps * self.job.tokens_per_step

    @property
    def seconds(self) -> float:
        """Seconds of the part's updates."""
        return self.steps * self.time.step_s

    @property
    def flops(self) -> float:
        """Floating-point operations of the part's forward and backward passes, without recomputation."""
        return float(self.tokens) * model_flops_per_token(self.job)

    def to_json(self) -> dict[str, Any]:
        """Part of the ramp as a JSON object."""
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
    """Parts of a run with `steps` updates, in order; empty without a ramp."""
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
    """Number of tokens that a run trains on within a time limit, at the speed of each part of its ramps.

    Args:
        job: The run.
        limit_s: Seconds that the run may take.
        tokens_per_s: Tokens per second without a ramp, and after a ramp.
    """
    tokens, left_s = 0.0, limit_s
    for part in ramp_parts(job, FOREVER):
        part_s = min(part.seconds, left_s)
        tokens += part_s / part.time.step_s * part.job.tokens_per_step
        left_s -= part_s
    return tokens + left_s * tokens_per_s
