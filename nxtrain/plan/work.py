"""Operations of a run's passes, and the bytes that they move: with everything trained, or with adapters.

A matrix takes two operations per entry and token forward, two for the gradient of its input, and two for its own. A
frozen matrix needs no gradient of its own: of six operations four are left. Norms, rotations, activations and sums
have few operations, and take the time in which the memory moves their tensors.
"""

from __future__ import annotations

from typing import NamedTuple

from nxtrain.plan.adapters import NF4_BYTES, adapter_entries, matrix_entries
from nxtrain.plan.job import SIZES, Job


class Work(NamedTuple):
    """Work of a pass for a micro-batch.

    Args:
        products: Operations of matrix products, over all tensor parallel ranks.
        attention: Operations of attention, over all tensor parallel ranks.
        moved: Bytes that a rank reads and writes between products, each operand and each result once.
    """

    products: float
    attention: float
    moved: float


def passes(job: Job, num_blocks: int, *, has_head: bool) -> tuple[Work, Work]:
    """Work of a part's forward and backward pass for a micro-batch, recomputation included."""
    per_token, tokens = job.dimensions.layer_costs(job.config.train.seq_len), job.micro_tokens
    attention = computed_attention_flops(job) * num_blocks
    matrices = (per_token.block - attention_flops(job)) * num_blocks
    head = per_token.head if has_head else 0
    adapters, moved = 2 * adapter_params(job) * num_blocks, _moved_bytes(job) * num_blocks
    logits = _moved_by_logits(job) if has_head else 0
    backward = 2 * (matrices + head) if job.adapters is None else matrices + head + 2 * adapters
    remat = job.config.train.remat
    again = matrices + adapters if remat == "full" else 0
    attended = (2 if remat == "none" else 3) * attention
    forward = Work(tokens * (matrices + head + adapters), tokens * attention, moved + logits)
    return forward, Work(tokens * (backward + again), tokens * attended, moved * (3 if remat == "full" else 2))


def _moved_bytes(job: Job) -> int:
    """Bytes that the forward pass of a block moves between products, if the compiler fuses what has no product between.

    Two norms read and write the residual stream, and two sums read two tensors and write one. Rotations read and write
    queries and keys. An activation reads its inputs and writes its result. The backward pass moves twice as much.
    """
    dimensions, tp = job.dimensions, job.config.parallel.tp
    stream = 10 * job.sequence_rows * dimensions.hidden_size
    rotated = 0 if dimensions.positions else 2 * (job.local_heads + job.local_kv_heads) * dimensions.head_size
    activated = (3 if dimensions.gated else 2) * -(-dimensions.intermediate_size // tp)
    return (stream + job.micro_tokens * (rotated + activated)) * job.params_size


def _moved_by_logits(job: Job) -> int:
    """Bytes that the loss moves: logits in the type of the model and in float32, and their gradient."""
    rows = -(-job.dimensions.vocab_size // job.config.parallel.tp)
    return job.micro_tokens * rows * (3 * job.params_size + 3 * SIZES["fp32"])


def computed_attention_flops(job: Job) -> int:
    """Operations of attention as its kernel computes it, per token and block: with a mask, those of all scores."""
    return attention_flops(job) * (2 if job.attention == "masked" else 1)


def attention_flops(job: Job) -> int:
    """Operations of causal attention forward, per token and block."""
    return 2 * job.dimensions.num_heads * job.dimensions.head_size * job.config.train.seq_len


def adapter_params(job: Job) -> int:
    """Entries of the adapters of a block, over all tensor parallel ranks."""
    return 0 if job.adapters is None else adapter_entries(job.stage(0), 1, 1, job.adapters).local


def trained_params(job: Job, params: int) -> int:
    """Trained parameters of the whole model, whose own number is given."""
    return params if job.adapters is None else job.dimensions.num_layers * adapter_params(job)


def model_flops_per_token(job: Job) -> int:
    """Operations of forward and backward for one token without recomputation, as the utilization counts them."""
    whole = job.dimensions.flops_per_token(job.config.train.seq_len)
    if job.adapters is None:
        return whole
    per_token = job.dimensions.layer_costs(job.config.train.seq_len)
    forward = job.dimensions.num_layers * per_token.block + per_token.head
    layers = job.dimensions.num_layers
    return 2 * forward + layers * (attention_flops(job) + 6 * adapter_params(job))


def restored_bytes(job: Job, num_blocks: int) -> float:
    """Bytes that a rank moves to restore the quantized matrices of some blocks once; 0 without quantization."""
    if job.method != "qlora":
        return 0.0
    entries = matrix_entries(job.stage(0), job.config.parallel.tp, 1).local
    return num_blocks * entries * (NF4_BYTES + SIZES["bf16"])
