"""Bytes of the projection to the vocabulary and of the loss, as `_VocabCrossEntropy` of `parallel/loss.py` has them."""

from __future__ import annotations

from nxtrain.plan.job import SIZES, Job, once_per_job

FLOAT = SIZES["fp32"]


@once_per_job
def kept_logits_bytes(job: Job) -> int:
    """Bytes that the loss keeps for backward: gradients of the hidden states, and of the matrix if it is trained."""
    rows = job.micro_tokens
    if job.adapters is None:
        rows += job.vocab_rows
    return rows * job.dimensions.hidden_size * job.params_size


@once_per_job
def chunk_bytes(job: Job) -> int:
    """Bytes of the projection and loss beside what they keep.

    A chunk of logits exists in its own type, in float32, and as a gradient; in fp16 the scaled gradient is wide first.
    Several chunks sum the matrix's gradient in float32, and join the gradients of the hidden states.
    """
    size = job.params_size
    hidden = job.dimensions.hidden_size
    tokens = job.micro_tokens
    rows = job.vocab_rows
    is_padded = rows * job.config.parallel.tp > job.dimensions.vocab_size
    wide_copies = 2 * FLOAT if is_padded else FLOAT
    entry = wide_copies if size == FLOAT else FLOAT + 2 * size
    if job.config.precision.params == "fp16":
        entry += wide_copies
    chunk = max(1, (job.config.train.logits_mib(job.backend) << 20) // (FLOAT * rows))
    if chunk >= tokens:
        return tokens * rows * entry
    num_bytes = chunk * rows * entry
    if job.adapters is None:
        later = min(chunk, tokens - chunk)  # of two chunks the second, which alone meets a sum, may be short
        num_bytes = max(num_bytes, later * rows * entry + rows * hidden * FLOAT)
    return num_bytes + tokens * hidden * size
