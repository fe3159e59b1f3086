"""Predicted device memory of a rank by kind: training state, activations, logits and buffers.

Training state follows the allocations of `train/build.py`, `parallel/data_parallel.py`, `parallel/fully_sharded.py` and
`optim/`. Activations follow the tensors that autograd saves in `nn/`, `parallel/linear.py`, `parallel/loss.py` and
`backends/kernels.py`. The keys of stochastic rounding and the tables of rotary positions are small and not included.
"""

from __future__ import annotations

from typing import NamedTuple

from nxtrain.plan.job import SIZES, Job
from nxtrain.plan.moments import accumulated_bytes, moments_of, offloaded_bytes
from nxtrain.plan.muon import hidden_entries, num_hidden

GIB = 1 << 30

WORKSPACE_BYTES = {"trn1": GIB, "trn2": 3 * GIB // 2, "trn3": 3 * GIB // 2, "cpu": 0}
"""Device memory that libraries take on Trainium and CPU, by kind of machine.

On Trainium this memory holds instructions, descriptors and scratch space of loaded graphs, and the collectives'
buffers.
"""

GPU_WORKSPACE_BYTES = 5 * GIB // 2
"""Device memory that libraries take on GPUs: CUDA context, cuBLAS, NCCL channels, and allocator fragmentation."""


class Bytes(NamedTuple):
    """Device memory of one rank by kind, in bytes, at the moment of a step with the highest total.

    Other moments of the step may need more of a single kind.

    Args:
        params: Trained parameters that the model computes with, or the stored shards under full sharding.
        frozen: Frozen parameters of a model with adapters, quantized or in the type of the model.
        grads: Gradients, summed over micro-batches or reduced, whichever takes more.
        optimizer: Running means, master copies or compensation, the weights' moving average, and under ZeRO-1 the
            rank's own rows of the parameters.
        activations: Tensors saved for the backward passes of all micro-batches in flight, and the current layer's
            temporary tensors beyond the chunk of logits, which is free by then.
        logits: Logits of a chunk, and the gradients that the loss saves.
        buckets: Buffers of collectives, including gathered parameters.
        workspace: Memory of libraries.
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
        """Device memory of all kinds together, in bytes."""
        state = self.params + self.frozen + self.grads + self.optimizer
        return state + self.activations + self.logits + self.buckets + self.workspace

    def to_json(self) -> dict[str, int]:
        """Device memory of each kind and in total, in bytes."""
        return {**self._asdict(), "total": self.total}


def rank_bytes(job: Job) -> tuple[int, Bytes]:
    """Pipeline stage whose ranks need most device memory, and the memory of such a rank."""
    # Among stages of one kind, the first has the most micro-batches in flight.
    stages = [(stage, stage_bytes(job, stage)) for stage in job.distinct_stages]
    return max(stages, key=lambda stage: stage[1].total)


def stage_bytes(job: Job, stage: int) -> Bytes:
    """Device memory of a rank of a pipeline stage, at the moment of a step with the highest total."""
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
    """Host memory of a rank by kind, in bytes, as `parallel.offload` selects; without the host's own needs."""
    kinds = {"params": 0, "grads": 0, "optimizer": 0, "activations": offloaded_bytes(job, stage)}
    if job.has_params_on_host:
        kinds["params"] = params_bytes(job, stage) + job.frozen(stage).held
        kinds["grads"] = accumulated_bytes(job, stage)
    if "optimizer" in job.config.parallel.offload:
        kinds["optimizer"] = optimizer_bytes(job, stage) - own_rows_bytes(job, stage)
    return {**kinds, "total": sum(kinds.values())}


def params_bytes(job: Job, stage: int) -> int:
    """Bytes of a rank's trained parameters: whole over dp, or under full sharding the first rank's rows."""
    entries = job.trained(stage)
    if job.is_fully_sharded:
        return entries.rows * job.stored_size
    return entries.local * job.stored_size


def optimizer_bytes(job: Job, stage: int) -> int:
    """Bytes of a rank's optimizer state, and of the parameter rows that ZeRO-1 updates.

    State follows `optim/adamw.py:AdamW` and `Muon`. Under full sharding with float32 storage the shards themselves are
    the master copies.
    """
    entries, hidden = job.trained(stage), hidden_entries(job, stage)
    updated, with_one_mean = entries.local, hidden.local
    if job.config.parallel.shard == "zero1" or job.is_fully_sharded:
        updated, with_one_mean = entries.rows, hidden.rows
    num_bytes = updated * state_size(job) + own_rows_bytes(job, stage)
    return num_bytes - with_one_mean * SIZES[job.config.precision.state]


def state_size(job: Job) -> int:
    """Bytes of AdamW's state per parameter that a rank updates, without ZeRO-1's own rows of the parameters.

    Muon has one running mean fewer.
    """
    return 2 * SIZES[job.config.precision.state] + master_size(job) + ema_size(job)


def ema_size(job: Job) -> int:
    """Bytes of the exponential moving average (EMA) per updated weight; 0 without `optim.ema_decay`."""
    return SIZES["fp32"] if job.config.optim.ema_decay else 0


def master_size(job: Job) -> int:
    """Bytes of the float32 master copy, or of the Kahan compensation, per updated parameter; 0 without either."""
    update = job.config.precision.update
    if update == "fp32_master" and job.stored_size != SIZES["fp32"]:
        return SIZES["fp32"]
    if update == "bf16_kahan":
        return SIZES["bf16"]
    return 0


def own_rows_bytes(job: Job, stage: int) -> int:
    """Bytes of the parameter rows that a rank updates under ZeRO-1, stored in addition to the whole parameters."""
    if job.config.parallel.shard != "zero1":
        return 0
    return job.trained(stage).rows * job.params_size


def checkpoint_bytes(job: Job, params: int) -> int:
    """Bytes of a checkpoint, which has each parameter and its optimizer state once in any layout."""
    precision = job.config.precision
    size = SIZES[precision.params] + 2 * SIZES[precision.state] + ema_size(job)
    if precision.update == "fp32_master":
        size += SIZES["fp32"]
    elif precision.update == "bf16_kahan":
        size += SIZES["bf16"]
    return params * size - num_hidden(job) * SIZES[precision.state]
