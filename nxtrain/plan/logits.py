"""Predicted bytes of the output projection and the loss, as allocated by `_VocabCrossEntropy` of `parallel/loss.py`."""

from __future__ import annotations

from nxtrain.plan.job import SIZES, Job, once_per_job

FLOAT = SIZES["fp32"]


@once_per_job
def kept_logits_bytes(job: Job) -> int:
    """Bytes that the loss saves for backward: gradients of hidden states, and of the output projection if trained."""
    rows = job.micro_tokens
    if job.adapters is None:
        rows += job.vocab_rows
    return rows * job.dimensions.hidden_size * job.params_size


@once_per_job
def chunk_bytes(job: Job) -> int:
    """Bytes of temporary tensors in the output projection and loss, for one chunk of logits.

    A chunk of logits exists in its own type, in float32, and as a gradient. In fp16 the scaled gradient is first in
    float32. With several chunks, the projection's gradient is summed in float32, and gradients of the hidden states are
    concatenated.
    """
    size = job.params_size
    hidden = job.dimensions.hidden_size
    tokens = job.micro_tokens
    rows = job.vocab_rows
    is_padded = rows * job.config.parallel.tp > job.dimensions.vocab_size
    wide_copies = 2 * FLOAT if is_padded else FLOAT
    entry = wide_copies
    if size < FLOAT:  # the masked copy of padded columns is free when the gradient gets its own type
        entry = size + max(wide_copies, FLOAT + size)
    if job.config.precision.params == "fp16":
        entry += wide_copies
    chunk = max(1, (job.config.train.logits_mib(job.backend) << 20) // (FLOAT * rows))
    if chunk >= tokens:
        return tokens * rows * entry
    num_bytes = chunk * rows * entry
    if job.adapters is None:
        later = min(chunk, tokens - chunk)  # with two chunks, only the second adds to a sum, and may be short
        num_bytes = max(num_bytes, later * rows * entry + rows * hidden * FLOAT)
    return num_bytes + tokens * hidden * size
