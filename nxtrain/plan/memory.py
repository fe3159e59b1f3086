"""Predicted device memory of a rank by kind: training state, activations, logits and buffers.

State follows the allocations of the code: `train/build.py`, `parallel/data_parallel.py`, `parallel/fully_sharded.py`
and `optim/`. Activations follow what autograd keeps: `nn/`, `parallel/linear.py`, `parallel/loss.py`,
`backends/kernels.py`. The keys of stochastic rounding and the tables of rotary positions are small and left out.
"""

from __future__ import annotations

from typing import NamedTuple

from nxtrain.plan.job import SIZES, Job
from nxtrain.plan.moments import accumulated_bytes, moments_of, offloaded_bytes
from nxtrain.plan.muon import hidden_entries, num_hidden

GIB = 1 << 30

WORKSPACE_BYTES = {"trn1": GIB, "trn2": 3 * GIB // 2, "trn3": 3 * GIB // 2, "cpu": 0}
"""Memory that libraries take on each device, by kind of machine.

On Trainium: instructions, descriptors and scratch space of loaded graphs, and the collectives' buffers.
"""

GPU_WORKSPACE_BYTES = 5 * GIB // 2
"""The same on GPUs: context, cuBLAS, NCCL's channels, and what the allocator cannot give out again."""


class Bytes(NamedTuple):
    """Device memory of one rank by kind, in bytes.

    Kinds are those of the moment of a step that needs most; other moments may need more of one kind.

    Args:
        params: Trained parameters that the model computes with, or the stored shards under full sharding.
        frozen: Parameters below adapters, quantized or in the type of the model.
        grads: Gradients, summed over micro-batches or reduced, whichever takes more.
        optimizer: Running means, master copies or compensation, the mean of the weights, and ZeRO-1's own rows of the
            parameters.
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
        return {**self._asdict(), "total": self.total}


def rank_bytes(job: Job) -> tuple[int, Bytes]:
    """Pipeline stage whose ranks need most memory, and its memory."""
    # Of stages of one kind, none has more micro-batches in flight than the first.
    stages = [(stage, stage_bytes(job, stage)) for stage in job.distinct_stages]
    return max(stages, key=lambda stage: stage[1].total)


def stage_bytes(job: Job, stage: int) -> Bytes:
    """Memory of a rank of a pipeline stage, at the moment of a step that needs most."""
    params, optimizer = params_bytes(job, stage), optimizer_bytes(job, stage)
    frozen = job.frozen(stage).held
    if job.has_params_on_host:
        params = frozen = 0
    if "optimizer" in job.config.parallel.offload:
        optimizer = own_rows_bytes(job, stage)
    most = max(moments_of(job, stage), key=sum)
    workspace = 0
    if job.config.backend.name != "cpu":
        workspace = WORKSPACE_BYTES.get(job.machine.kind, GPU_WORKSPACE_BYTES)
    return Bytes(
        params=params,
        frozen=frozen,
        grads=most.grads,
        optimizer=optimizer,
        activations=most.activations,
        logits=most.logits,
        buckets=most.buckets,
        workspace=workspace,
    )


def host_bytes(job: Job, stage: int) -> dict[str, int]:
    """Bytes of a rank in host memory by kind, as `parallel.offload` asks; what the host needs itself comes on top."""
    kinds = {"params": 0, "grads": 0, "optimizer": 0, "activations": offloaded_bytes(job, stage)}
    if job.has_params_on_host:
        kinds["params"] = params_bytes(job, stage) + job.frozen(stage).held
        kinds["grads"] = accumulated_bytes(job, stage)
    if "optimizer" in job.config.parallel.offload:
        kinds["optimizer"] = optimizer_bytes(job, stage) - own_rows_bytes(job, stage)
    return {**kinds, "total": sum(kinds.values())}


def params_bytes(job: Job, stage: int) -> int:
    """Trained parameters: whole over data parallel ranks, or the first rank's rows of each under full sharding."""
    entries = job.trained(stage)
    if job.is_fully_sharded:
        return entries.rows * job.stored_size
    return entries.local * job.stored_size


def optimizer_bytes(job: Job, stage: int) -> int:
    """Optimizer state, as `optim/adamw.py:AdamW` and `Muon` make it, and the rows that ZeRO-1 updates.

    Under full sharding with float32 storage the shards themselves are the master copies.
    """
    entries, hidden = job.trained(stage), hidden_entries(job, stage)
    updated, with_one_mean = entries.local, hidden.local
    if job.config.parallel.shard == "zero1" or job.is_fully_sharded:
        updated, with_one_mean = entries.rows, hidden.rows
    num_bytes = updated * state_size(job) + own_rows_bytes(job, stage)
    return num_bytes - with_one_mean * SIZES[job.config.precision.state]


def state_size(job: Job) -> int:
    """Bytes of AdamW's state for each entry that a rank updates, without ZeRO-1's own rows of the parameters.

    Muon has one running mean less.
    """
    return 2 * SIZES[job.config.precision.state] + master_size(job) + ema_size(job)


def ema_size(job: Job) -> int:
    """Bytes of the running mean of each updated weight; 0 without `optim.ema_decay`."""
    return SIZES["fp32"] if job.config.optim.ema_decay else 0


def master_size(job: Job) -> int:
    """Bytes of the float32 master copy of each updated entry, or of its correction by Kahan; 0 without either."""
    update = job.config.precision.update
    if update == "fp32_master" and job.stored_size != SIZES["fp32"]:
        return SIZES["fp32"]
    if update == "bf16_kahan":
        return SIZES["bf16"]
    return 0


def own_rows_bytes(job: Job, stage: int) -> int:
    """Rows of the parameters that a rank updates under ZeRO-1, beside the whole parameters."""
    if job.config.parallel.shard != "zero1":
        return 0
    return job.trained(stage).rows * job.params_size


def checkpoint_bytes(job: Job, params: int) -> int:
    """Bytes of a checkpoint: each parameter and its optimizer state once, whatever the layout."""
    precision = job.config.precision
    size = SIZES[precision.params] + 2 * SIZES[precision.state] + ema_size(job)
    if precision.update == "fp32_master":
        size += SIZES["fp32"]
    elif precision.update == "bf16_kahan":
        size += SIZES["bf16"]
    return params * size - num_hidden(job) * SIZES[precision.state]
