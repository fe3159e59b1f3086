"""Operations of a run's passes: with everything trained, or with adapters beside a frozen model.

A matrix takes two operations per entry and token forward, two for the gradient of its input, and two for its own. A
frozen matrix needs no gradient of its own: of six operations four are left.
"""

from __future__ import annotations

from nxtrain.plan.adapters import NF4_BYTES, adapters_of_block, is_matrix
from nxtrain.plan.job import SIZES, Job
from nxtrain.plan.shapes import block_entries, block_specs, costs, flops_per_token


def passes_flops(job: Job, num_blocks: int, *, has_head: bool) -> tuple[float, float]:
    """Operations of a part's forward and backward pass for a micro-batch, over all tensor parallel ranks."""
    per_token = costs(job.decoder, job.config.train.seq_len)
    block, head = per_token.block * num_blocks, per_token.head if has_head else 0
    attention = attention_flops(job) * num_blocks
    adapters = 2 * adapter_params(job) * num_blocks
    forward = block + head + adapters
    backward = 2 * (block + head) if job.adapters is None else block + attention + head + 2 * adapters
    again = {"none": 0, "selective": attention, "full": block + adapters}[job.config.train.remat]
    return job.micro_tokens * forward, job.micro_tokens * (backward + again)


def attention_flops(job: Job) -> int:
    """Operations of causal attention forward, per token and block."""
    return 2 * job.decoder.num_heads * job.decoder.head_size * job.config.train.seq_len


def adapter_params(job: Job) -> int:
    """Entries of the adapters of a block, over all tensor parallel ranks."""
    return 0 if job.adapters is None else adapters_of_block(job.stage(0), 1, 1, job.adapters).local


def trained_params(job: Job, params: int) -> int:
    """Trained parameters of the whole model, whose own number is given."""
    return params if job.adapters is None else job.decoder.num_layers * adapter_params(job)


def model_flops_per_token(job: Job) -> int:
    """Operations of forward and backward for one token without recomputation, as the utilization counts them."""
    whole = flops_per_token(job.decoder, job.config.train.seq_len)
    if job.adapters is None:
        return whole
    per_token = costs(job.decoder, job.config.train.seq_len)
    forward = job.decoder.num_layers * per_token.block + per_token.head
    layers = job.decoder.num_layers
    return 2 * forward + layers * (attention_flops(job) + 6 * adapter_params(job))


def restored_bytes(job: Job, num_blocks: int) -> float:
    """Bytes that a rank moves to restore the quantized matrices of some blocks once; 0 without quantization."""
    if job.method != "qlora":
        return 0.0
    matrices = {
        name: spec for name, spec in block_specs(job.decoder, job.config.parallel.tp).items() if is_matrix(spec)
    }
    entries = block_entries(matrices, job.config.parallel.tp, 1).local
    return num_blocks * entries * (NF4_BYTES + SIZES["bf16"])
