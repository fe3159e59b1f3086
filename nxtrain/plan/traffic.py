"""Predicted traffic: bytes that a rank sends in a step, by axis and link, and the seconds of these transfers.

Counts follow `parallel/linear.py` and `parallel/regions.py` (tp), `parallel/data_parallel.py` and
`parallel/fully_sharded.py` (dp), and `parallel/pipeline.py` (pp). Traffic of cp is in `plan/context.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nxtrain.plan.activations import boundary_bytes
from nxtrain.plan.job import SIZES, Job
from nxtrain.plan.moments import reduced_bytes
from nxtrain.plan.shapes import rest_entries

Link = Literal["none", "device", "network"]


@dataclass(frozen=True)
class Traffic:
    """Communication of one rank over one axis in a step.

    Args:
        axis: `tp`, `cp`, `ep`, `dp` or `pp`; `dp` includes sums over cp. `update` is between the ranks that divide
            Muon's matrices.
        link: Slowest link that the axis spans: between devices of a machine, or between machines.
        bytes: Bytes that a rank sends.
        seconds: Seconds of the transfers.
        hidden: Share of this time in which the rank computes.
    """

    axis: str
    link: Link
    bytes: int
    seconds: float
    hidden: float


@dataclass(frozen=True)
class Links:
    """Bandwidths that collectives reach, in bytes per second.

    Args:
        device: Bandwidth from a rank to the other devices of its machine.
        network: Bandwidth from a machine to other machines.
    """

    device: float
    network: float


def tp_bytes(job: Job, num_blocks: int) -> tuple[float, float, float]:
    """Bytes that a rank sends over tp for one micro-batch through some blocks.

    Each of a block's two pairs of layers gathers and reduce-scatters once in the forward pass. The backward pass
    repeats both, and gathers the inputs once more. Without sequence parallelism there are two all-reduces forward and
    two backward, each with twice the bytes. Recomputed blocks repeat the forward pass. A frozen layer saves no inputs
    and has no weight gradient. The exchanges of adapters are as narrow as their rank, and are not included.

    Returns:
        Bytes of the forward pass, bytes of the backward pass, and the backward bytes of column layers. Products may
        hide the transfers of column layers.
    """
    parallel, remat = job.config.parallel, job.config.train.remat
    if parallel.tp == 1:
        return 0.0, 0.0, 0.0
    whole = job.micro_tokens * job.dimensions.hidden_size * job.params_size * (parallel.tp - 1) / parallel.tp
    is_trained = job.adapters is None
    transfers = 4
    if parallel.sequence_parallel and is_trained:
        transfers += 2
    if remat == "full":
        transfers += 4
    forward, backward = num_blocks * 4 * whole, num_blocks * transfers * whole
    if not is_trained:
        return forward, backward, 0.0
    return forward, backward, forward


def ring_s(job: Job, size: int, num_bytes: float, links: Links, *, spread: int) -> float:
    """Seconds in which ranks send `num_bytes` each around the ring of their group, all groups at once.

    Args:
        job: The run.
        size: Number of ranks of a group.
        num_bytes: Bytes that each rank sends.
        links: Bandwidths.
        spread: Distance of neighbours in the group, in ranks.
    """
    if size == 1 or not num_bytes:
        return 0.0
    per_node = max(1, min(size, job.machine.devices // spread))
    device_s = 0.0
    if per_node > 1 and links.device:
        device_s = num_bytes / links.device
    if size <= per_node:
        return device_s
    if not links.network:
        return float("inf")
    # A ring enters each machine once, so one rank per machine sends to the next machine.
    rings = max(1, min(job.world, job.machine.devices) // per_node)
    return max(device_s, rings * num_bytes / links.network)


def exchange_s(job: Job, size: int, num_bytes: float, links: Links, *, spread: int) -> float:
    """Seconds of an all-to-all in which each rank sends `num_bytes`, in equal parts to the other ranks of its group.

    Args:
        job, size, links, spread: As for `ring_s`.
        num_bytes: Bytes that each rank sends.
    """
    if size == 1 or not num_bytes:
        return 0.0
    per_node = max(1, min(size, job.machine.devices // spread))
    within = num_bytes * (per_node - 1) / (size - 1)
    device_s = within / links.device if within and links.device else 0.0
    if size <= per_node:
        return device_s
    if not links.network:
        return float("inf")
    return max(device_s, min(job.world, job.machine.devices) * (num_bytes - within) / links.network)


def link_of(job: Job, size: int, spread: int) -> Link:
    """Slowest link between the ranks of a group.

    Args:
        job: The run.
        size: Number of ranks of the group.
        spread: Distance of neighbours in the group, in ranks.
    """
    if size == 1:
        return "none"
    if size * spread <= job.machine.devices:
        return "device"
    return "network"


def sync_bytes(job: Job, stage: int) -> tuple[float, float]:
    """Bytes that a rank sends once per step for gradients and parameters: over the shard ranks, and over the replicas.

    An all-reduce sends twice (n-1)/n of its bytes, a reduce-scatter or an all-gather once.
    """
    parallel, reduce = job.config.parallel, SIZES[job.config.precision.reduce]
    trained = job.trained(stage, 1)
    experts = (job.copies // parallel.ep - 1) / (job.copies // parallel.ep) * trained.experts
    sent = (job.copies - 1) / job.copies * (trained.local - trained.experts) + experts
    if job.is_fully_sharded:
        replicas = job.copies // job.shard_size
        return 0.0, 2 * (replicas - 1) / replicas * reduced_bytes(job, stage)
    if parallel.shard == "zero1":
        return sent * (reduce + job.params_size), 0.0
    return 2 * sent * reduce, 0.0


def gather_bytes(job: Job, stage: int) -> float:
    """Bytes that a rank sends per micro-batch under full sharding, to gather parameters and reduce-scatter gradients.

    Blocks are gathered for each pass, unless they stay gathered between the passes. Other parameters are gathered once.
    """
    if not job.is_fully_sharded:
        return 0.0
    parallel, reduce = job.config.parallel, SIZES[job.config.precision.reduce]
    trained, frozen = job.trained(stage, 1), job.frozen(stage)
    gathers = 1 if parallel.shard == "grad_op" else 2
    share = (job.shard_size - 1) / job.shard_size
    outer = frozen.rest
    if job.adapters is None:
        outer = rest_entries(job.stages[stage], parallel.tp, 1).local * job.params_size
    base = frozen.blocks + frozen.rest
    holders = job.shard_size // parallel.ep
    experts = (holders - 1) / holders * trained.experts
    sent = share * (trained.local - trained.experts) + experts
    gathered = gathers * (share * base + sent * job.params_size) - (gathers - 1) * share * outer
    return gathered + sent * reduce


def pp_bytes(job: Job) -> float:
    """Bytes that a rank sends to neighbouring stages in a step: an activation and a gradient for each micro-batch."""
    parallel = job.config.parallel
    if parallel.pp == 1:
        return 0.0
    return 2.0 * job.num_micro * parallel.virtual_pp * boundary_bytes(job)
