"""Predicted device memory of a rank by kind: training state, activations, logits and buffers.

State follows the allocations of the code: `train/build.py`, `parallel/data_parallel.py`, `parallel/fully_sharded.py`
and `optim/adamw.py`. Activations follow what autograd keeps: `nn/`, `parallel/linear.py`, `parallel/loss.py`,
`backends/kernels.py`. The keys of stochastic rounding and the tables of rotary positions are small and left out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from nxtrain.parallel.schedule import num_warmup
from nxtrain.plan.activations import block_bytes, boundary_bytes, chunk_bytes, kept_logits_bytes, working_bytes
from nxtrain.plan.adapters import adapters_of_block
from nxtrain.plan.job import SIZES, Job
from nxtrain.plan.shapes import beside_blocks, one_block

GIB = 1 << 30

WORKSPACE_BYTES = {"trn1": GIB, "trn2": 3 * GIB // 2, "trn3": 3 * GIB // 2, "cpu": 0}
"""Memory that libraries take on each device, by kind of machine.

On Trainium: instructions, descriptors and scratch space of loaded graphs, and the collectives' buffers.
"""

GPU_WORKSPACE_BYTES = 5 * GIB // 2
"""The same on GPUs: context, cuBLAS, NCCL's channels, and what the allocator cannot give out again."""

WHOLE_WRITE = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class Bytes:
    """Device memory of one rank by kind, in bytes.

    With one micro-batch the sum is a bound: activations are freed while gradients come into being.

    Args:
        params: Trained parameters that the model computes with, or the stored shards under full sharding.
        frozen: Parameters below adapters, quantized or in the type of the model.
        grads: Gradients, summed over micro-batches or reduced, whichever takes more.
        optimizer: Running means, master copies or compensation, and ZeRO-1's own rows of the parameters.
        activations: Tensors kept for the backward passes of all micro-batches in flight, and those that the layer at
            work needs beyond the chunk of logits, which is free by then.
        logits: Logits of a chunk, and the gradients that the loss keeps.
        buckets: Buffers of collectives, gathered parameters included.
        workspace: What libraries take.
    """

    params: int
    frozen: int
    grads: int
    optimizer: int
    activations: int
    logits: int
    buckets: int
    workspace: int

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        state = self.params + self.frozen + self.grads + self.optimizer
        return state + self.activations + self.logits + self.buckets + self.workspace

    def to_json(self) -> dict[str, int]:
        """All kinds and their sum."""
        return {**asdict(self), "total": self.total}


def rank_bytes(job: Job) -> tuple[int, Bytes]:
    """Pipeline stage whose ranks need most memory, and its memory."""
    # Of stages of one kind, none has more micro-batches in flight than the first.
    return max(((stage, stage_bytes(job, stage)) for stage in job.distinct_stages), key=lambda each: each[1].total)


def stage_bytes(job: Job, stage: int) -> Bytes:
    """Memory of a rank of a pipeline stage."""
    params, optimizer, frozen = params_bytes(job, stage), optimizer_bytes(job, stage), job.frozen(stage)
    grads = max(accumulated_bytes(job, stage), reduced_bytes(job, stage))
    last = any(part.last for part in job.parts[stage])
    chunk = chunk_bytes(job) if last else 0
    # The loss frees its chunk before the first layer's backward pass.
    held = kept_bytes(job, stage) + max(0, working_bytes(job) + frozen.largest_matrix - chunk)
    logits = chunk + kept_logits_bytes(job) if last else 0
    buckets = bucket_bytes(job, stage, spare=grads + held + logits)
    on_device = frozen.held
    if job.config.parallel.offload and job.is_fully_sharded:
        params = on_device = grads = optimizer = 0
    return Bytes(params, on_device, grads, optimizer, held, logits, buckets, workspace_bytes(job))


def workspace_bytes(job: Job) -> int:
    """Memory that libraries take."""
    if job.config.backend.name == "cpu":
        return 0
    return WORKSPACE_BYTES.get(job.machine.kind, GPU_WORKSPACE_BYTES)


def params_bytes(job: Job, stage: int) -> int:
    """Trained parameters: whole over data parallel ranks, or the first rank's rows of each under full sharding."""
    entries = job.trained(stage)
    return (entries.rows if job.is_fully_sharded else entries.local) * job.stored_size


def optimizer_bytes(job: Job, stage: int) -> int:
    """Optimizer state, as `optim/adamw.py:AdamW` makes it, and the rows that ZeRO-1 updates.

    Under full sharding with float32 storage the shards themselves are the master copies.
    """
    precision = job.config.precision
    entries = job.trained(stage)
    zero1 = job.config.parallel.shard == "zero1"
    number = entries.rows if zero1 or job.is_fully_sharded else entries.local
    size = 2 * SIZES[precision.state]
    if precision.update == "fp32_master" and job.stored_size != SIZES["fp32"]:
        size += SIZES["fp32"]
    if precision.update == "bf16_kahan":
        size += SIZES["bf16"]
    if zero1:
        size += job.params_size
    return number * size


def accumulated_bytes(job: Job, stage: int) -> int:
    """Gradients before their reduction: `.grad`, or the sums of `parallel/data_parallel.py:Bucketed`."""
    entries = job.trained(stage)
    if job.is_fully_sharded:
        return entries.rows * job.stored_size
    accumulate = SIZES[job.config.precision.accumulate]
    return entries.local * (accumulate if job.num_micro > 1 else job.params_size)


def reduced_bytes(job: Job, stage: int) -> int:
    """Gradients that the optimizer gets, in the type of the reduction."""
    entries = job.trained(stage)
    parallel = job.config.parallel
    if job.is_fully_sharded or parallel.dp == 1:
        return accumulated_bytes(job, stage)
    return (entries.rows if parallel.shard == "zero1" else entries.local) * SIZES[job.config.precision.reduce]


def bucket_bytes(job: Job, stage: int, spare: int) -> int:
    """Buffers of collectives over data parallel ranks.

    - Replicated: the flat copy of one bucket.
    - ZeRO-1: a bucket padded, packed and scattered. After the update all buckets are gathered at once, in the type of
      the parameters; by then gradients and activations are freed.
    - Full sharding: gathered blocks (the one at work, and those ahead, or all of them), the unit of the remaining
      parameters, and one block's gradient in its own type and in that of the reduction.

    Args:
        job: The run.
        stage: Pipeline stage.
        spare: Bytes that are free again when ZeRO-1 gathers.
    """
    parallel, precision, entries = job.config.parallel, job.config.precision, job.trained(stage)
    reduce = SIZES[precision.reduce]
    if parallel.dp == 1:
        return 0
    if job.is_fully_sharded:
        block, rest, trained = gathered_bytes(job, stage)
        num_blocks = sum(job.stage(stage).blocks)
        ahead = 1 + max(1, parallel.prefetch)
        blocks = num_blocks if parallel.shard == "grad_op" else min(num_blocks, ahead)
        return blocks * block + rest + trained * (job.params_size + reduce)
    bucket = min(entries.local * reduce, max(parallel.bucket_mib << 20, entries.largest * reduce))
    if parallel.shard != "zero1":
        return bucket
    gathered = entries.local * job.params_size + reduced_bytes(job, stage)
    return max(2 * bucket + bucket // parallel.dp, gathered - spare)


def gathered_bytes(job: Job, stage: int) -> tuple[int, int, int]:
    """Bytes of a gathered block and of the other parameters, and the entries of the larger one's gradient."""
    kind, tp, size = job.stage(stage), job.config.parallel.tp, job.params_size
    if job.adapters is None:
        block, rest = one_block(kind, tp, 1).local, beside_blocks(kind, tp, 1).local
        return block * size, rest * size, max(block, rest)
    adapters, frozen = adapters_of_block(kind, tp, 1, job.adapters).local, job.frozen(stage)
    return frozen.block + adapters * size, frozen.rest, adapters


def kept_bytes(job: Job, stage: int) -> int:
    """Activations kept for the backward passes of all micro-batches in flight, and the tensors of transfers."""
    parallel = job.config.parallel
    kept = max(job.stage(stage).blocks) * block_bytes(job)
    # The final norm keeps its input and a number per row.
    norm = job.sequence_rows * (job.decoder.hidden_size * job.params_size + WHOLE_WRITE)
    last = norm if any(part.last for part in job.parts[stage]) else 0
    between = 3 * boundary_bytes(job) if parallel.pp > 1 else 0
    return in_flight(job, stage) * kept + last + between


def in_flight(job: Job, stage: int) -> int:
    """Most forwards of a pipeline rank, of any chunk, whose backward is still to come."""
    parallel, total = job.config.parallel, job.num_micro * job.config.parallel.virtual_pp
    if parallel.pp == 1:
        return 1
    postponed = stage if parallel.schedule == "zero_bubble" else 0
    return min(total, num_warmup(parallel.pp, parallel.virtual_pp, job.num_micro, stage) + 1 + postponed)


def checkpoint_bytes(job: Job, params: int) -> int:
    """Bytes of a checkpoint: each parameter and its optimizer state once, whatever the layout."""
    precision = job.config.precision
    size = SIZES[precision.params] + 2 * SIZES[precision.state]
    size += SIZES["fp32"] * (precision.update == "fp32_master") + SIZES["bf16"] * (precision.update == "bf16_kahan")
    return params * size
