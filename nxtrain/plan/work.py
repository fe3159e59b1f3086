"""Operations of the forward and backward passes, and bytes that they move, for full training and for adapters.

A matrix takes two operations per entry and token in the forward pass, two for the gradient of its input, and two for
its own gradient. A frozen matrix needs no gradient, so four of six operations remain. Norms, rotations, activations and
sums have few operations, and are bound by memory bandwidth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from nxtrain.backends.limits import XLA_LOOPS
from nxtrain.plan.adapters import NF4_BYTES, adapter_entries, matrix_entries, num_adapter_params
from nxtrain.plan.context import moved_scores, work_share
from nxtrain.plan.float8 import casts, float8_params
from nxtrain.plan.job import SIZES, Job


class Work(NamedTuple):
    """Work of one pass over one micro-batch.

    Args:
        products: Operations of matrix products, over all tensor parallel ranks.
        attention: Operations of attention, over all tensor parallel ranks.
        moved: Bytes that a rank reads and writes between products, each operand and each result once.
        float8: Operations of `products` that are in float8.
    """

    products: float
    attention: float
    moved: float
    float8: float = 0.0


def passes(job: Job, blocks: range, *, has_head: bool, fused_context: bool = False) -> tuple[Work, Work]:
    """Work of the forward and the backward pass of a chunk of the model for one micro-batch, recomputation included.

    Args:
        job: The run.
        blocks: Blocks of the chunk.
        has_head: The chunk ends with the loss.
        fused_context: A fused kernel computes attention between context parallel ranks, as in other libraries.
    """
    tokens = job.micro_tokens
    num_blocks = len(blocks)
    remat = job.config.train.remat
    attention, scores = _attention(job, blocks, fused_context=fused_context)
    matrices = num_blocks * 2 * job.dimensions.block_matmul_params
    adapters = num_blocks * 2 * adapter_params(job)
    moved = num_blocks * _moved_bytes(job) + scores
    head = logits = 0
    if has_head:
        head = 2 * job.dimensions.vocab_size * job.dimensions.hidden_size
        # The loss moves logits in the type of the model and in float32, and their gradient.
        logits = job.micro_tokens * job.vocab_rows * (3 * job.params_size + 3 * SIZES["fp32"])
    cast, narrow = casts(job), num_blocks * 2 * float8_params(job)
    moved_forward = moved + logits + num_blocks * cast.forward
    forward = Work(tokens * (matrices + head + adapters), tokens * attention, moved_forward, tokens * narrow)
    backward = matrices + head + 2 * adapters
    if job.adapters is None:
        backward += matrices + head
    attentions = 2 if remat == "none" else 3
    moved_backward, narrow_backward = 2 * moved + num_blocks * cast.backward, narrow
    if job.adapters is None:
        narrow_backward += narrow
    if remat == "full":
        backward += matrices + adapters
        moved_backward += moved + num_blocks * cast.forward
        narrow_backward += narrow
    return forward, Work(tokens * backward, tokens * attentions * attention, moved_backward, tokens * narrow_backward)


def _moved_bytes(job: Job) -> int:
    """Bytes that a block's forward pass moves between products, if the compiler fuses all operations between products.

    Two norms read and write the residual stream, and two sums read two tensors and write one. Rotations read and write
    queries and keys. An activation reads its inputs and writes its result. The backward pass moves twice as much.
    """
    stream = 10 * job.sequence_rows * job.dimensions.hidden_size
    tensors = 3 if job.dimensions.gated else 2
    per_token = tensors * job.inner_width
    if job.dimensions.mixture is not None:
        # Rows are gathered and their outputs are summed by token; each is read and written.
        per_token = job.dimensions.mixture.experts_per_token * (per_token + 4 * job.dimensions.hidden_size)
    if not job.dimensions.positions:
        per_token += 2 * (job.query_width + job.key_width)
    return (stream + job.micro_tokens * per_token) * job.params_size


def _attention(job: Job, blocks: range, *, fused_context: bool) -> tuple[float, int]:
    """Operations per token of the forward attention of some blocks, and bytes of the scores that the blocks move."""
    flops, moved = 0.0, 0
    fused_context = fused_context or job.fuses_context
    for window, number in job.dimensions.windows(blocks):
        one: float = job.dimensions.attention_flops(job.computed_len, window)
        if job.config.parallel.cp > 1:
            one *= work_share(job, window, skips=fused_context or not job.meets_all_keys)
            if not fused_context:
                moved += number * moved_scores(job, window)
        elif job.is_lazy and window is None and job.full_attention == "blocked":
            one *= 1 + 1 / XLA_LOOPS  # all blocks of a loop meet the keys up to the loop's last query
        flops += number * one
    return flops, moved


def adapter_params(job: Job) -> int:
    """Number of a block's adapter parameters that a token passes through, over all ranks."""
    if job.adapters is None:
        return 0
    entries, mixture = adapter_entries(replace(job.stages[0], ep=1), 1, 1, job.adapters), job.dimensions.mixture
    if mixture is None:
        return entries.local
    return entries.local - entries.experts + entries.experts * mixture.experts_per_token // mixture.num_experts


def trained_params(job: Job) -> int:
    """Number of trained parameters of the whole model."""
    if job.adapters is None:
        return job.dimensions.num_params
    return num_adapter_params(job.dimensions, job.adapters)


def model_flops_per_token(job: Job) -> int:
    """Operations of forward and backward for one token, without recomputation, as MFU counts them."""
    num_layers = job.dimensions.num_layers
    whole = job.dimensions.flops_per_token(job.sequence_len)
    if job.adapters is None:
        return whole
    matrices = num_layers * job.dimensions.block_matmul_params + job.dimensions.vocab_size * job.dimensions.hidden_size
    attention = whole // 3 - 2 * matrices
    return 2 * whole // 3 + attention + num_layers * 6 * adapter_params(job)


def restored_bytes(job: Job, num_blocks: int) -> float:
    """Bytes that a rank moves to dequantize the NF4 matrices of some blocks once; 0 without quantization."""
    if job.method != "qlora":
        return 0.0
    entries = matrix_entries(job.stages[0], job.config.parallel.tp, 1).local
    return num_blocks * entries * (NF4_BYTES + SIZES["bf16"])
