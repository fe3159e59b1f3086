"""Predicted work and memory of float8 products in blocks: operations, casts, and the copies that a product holds.

Under `compile.torch_compile` a cast reads its matrix once and writes float8 bytes. Eager casts hold the scaled matrix
in float32 next to two float8 copies, one of them transposed.
"""

from __future__ import annotations

from typing import NamedTuple

from nxtrain.plan.job import Job, once_per_job

EAGER_BYTES, COMPILED_BYTES = 6, 1
"""Bytes per matrix entry that a float8 cast holds, eager and compiled."""


class Casts(NamedTuple):
    """Bytes that a rank reads and writes to cast the operands of a block's float8 products, for one micro-batch."""

    forward: int
    backward: int


def float8_params(job: Job) -> int:
    """Number of parameters of a block whose products are in float8, over all tensor parallel ranks."""
    if job.config.precision.fp8 == "none":
        return 0
    shape = job.dimensions
    if shape.mixture is None:
        return shape.block_matmul_params
    return shape.block_matmul_params - shape.hidden_size * (shape.mixture.num_experts + 3 * shape.active_width)


def casts(job: Job) -> Casts:
    """Bytes read and written by the float8 casts of a block, for one micro-batch; zeros without float8."""
    if job.config.precision.fp8 == "none":
        return Casts(0, 0)
    hidden, inner = job.dimensions.hidden_size, _inner(job)
    inputs = job.micro_tokens * (hidden + job.query_width + (hidden + inner if inner else 0))
    outputs = job.query_width + 2 * job.key_width + hidden + (_parts(job) * inner + hidden if inner else 0)
    grads, weights = job.micro_tokens * outputs, float8_params(job) // job.config.parallel.tp
    size = job.params_size + 1
    if job.adapters is not None:  # frozen weights have no gradients
        return Casts((inputs + weights) * size, (grads + weights) * size)
    return Casts((inputs + weights) * size, (2 * grads + inputs + weights) * size)


@once_per_job
def product_bytes(job: Job) -> int:
    """Bytes of gradients and float8 copies in the largest product, the projection to gate and up; 0 without float8."""
    if job.config.precision.fp8 == "none":
        return 0
    hidden = job.dimensions.hidden_size
    width = _parts(job) * _inner(job) if job.config.model.fused_gate_up else _inner(job)
    width = width or job.query_width + 2 * job.key_width  # experts have other products
    grad, others = job.micro_tokens * width, max(job.micro_tokens * hidden, width * hidden)
    size = COMPILED_BYTES if job.config.compile.torch_compile else EAGER_BYTES
    whole = job.micro_tokens * max(_parts(job) * _inner(job), width) * job.params_size
    return whole + max(size * grad, grad + size * others)


def _parts(job: Job) -> int:
    return 2 if job.dimensions.gated else 1


def _inner(job: Job) -> int:
    """Intermediate size on a rank of a feed-forward with float8 products; 0 for experts, which have none."""
    return job.inner_width if job.dimensions.mixture is None else 0
