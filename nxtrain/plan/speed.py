"""Predicted time of a training step: computation, communication, the pipeline's bubble and the update.

`SPEEDS` has all constants that stand for software. A row serves every model, layout and number of machines of a kind of
chip; docs/planning.md compares its predictions with published runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from nxtrain.plan.job import Job
from nxtrain.plan.memory import optimizer_bytes, params_bytes, reduced_bytes
from nxtrain.plan.pipeline import PipelineCosts
from nxtrain.plan.shapes import costs, flops_per_token
from nxtrain.plan.traffic import Links, Traffic, gather_bytes, link_of, pp_bytes, ring_s, sync_bytes, tp_bytes


@dataclass(frozen=True)
class Speed:
    """Constants of a kind of chip.

    Args:
        compute: Share of the peak that a compiled model reaches, communication apart.
        eager: The same without a compiler.
        link: Share of the bandwidth between devices that collectives reach.
        network: Share of the network's bandwidth that collectives reach.
        overlap: Largest share of communication over data parallel ranks that backward passes hide.
        basis: Origin of the constants.
    """

    compute: float
    eager: float
    link: float
    network: float
    overlap: float
    basis: str


SPEEDS = {
    "trn1": Speed(0.47, 0.47, 0.31, 0.8, 0.0, "calibrated on published runs on trn1"),
    "trn2": Speed(0.47, 0.47, 0.31, 0.8, 0.0, "those of trn1: no training throughput is published for this chip"),
    "trn3": Speed(0.47, 0.47, 0.31, 0.8, 0.0, "those of trn1: no training throughput is published for this chip"),
    "a100": Speed(0.66, 0.57, 0.6, 0.7, 0.9, "calibrated on published runs on A100"),
    "hopper": Speed(0.39, 0.34, 0.6, 0.7, 0.9, "calibrated on published runs on H100"),
}
"""Constants by kind of chip."""

OTHER = Speed(0.45, 0.38, 0.6, 0.7, 0.9, "between those of A100 and H100: nothing published was compared")
"""Constants of other chips."""

MEMORY_SHARE = 0.75
"""Share of the memory's bandwidth that the update reaches, which reads and writes all state once."""


@dataclass(frozen=True)
class StepTime:
    """Predicted time of a step.

    Args:
        step_s: Seconds.
        compute_s: Seconds of the computations of the slowest stage, recomputation included.
        update_s: Seconds of the update.
        bubble: Share of the pipeline's time in which ranks wait for each other, unequal stages included.
        traffic: Communication by axis.
        mfu: Operations of the model, without recomputation, over those of the peak in `step_s`.
        basis: Origin of the constants.
    """

    step_s: float
    compute_s: float
    update_s: float
    bubble: float
    traffic: tuple[Traffic, ...]
    mfu: float
    basis: str


def step_time(job: Job) -> StepTime:
    """Time of a step."""
    speed = SPEEDS.get(job.machine.kind, OTHER)
    links = Links(job.machine.link_bytes_s * speed.link, job.machine.network_bytes_s * speed.network)
    parallel = job.config.parallel
    compiled = job.is_trainium or job.config.compile.torch_compile
    rate = parallel.tp * job.machine.device_flops * (speed.compute if compiled else speed.eager)

    forward_s, backward_s, tp_s = [], [], []
    costs_of: dict[tuple[int, bool], tuple[float, float, float]] = {}
    for part in [own[chunk] for chunk in range(parallel.virtual_pp) for own in job.parts]:
        kind = len(part.blocks), part.last
        if kind not in costs_of:
            costs_of[kind] = (*_flops(job, kind[0], has_head=part.last), _tp_seconds(job, kind[0], links))
        forward, backward, sent_s = costs_of[kind]
        forward_s.append(forward / rate + sent_s / 3)
        backward_s.append(backward / rate + sent_s * 2 / 3)
        tp_s.append(sent_s)
    busy = [sum(f + b for f, b in _own(job, forward_s, backward_s, rank)) for rank in range(parallel.pp)]
    slowest = max(range(parallel.pp), key=lambda rank: busy[rank])

    gather_s = ring_s(job, job.shard_size, gather_bytes(job, slowest), links, spread=parallel.tp)
    exposed_gather_s = max(gather_s * (1.0 - speed.overlap), gather_s - busy[slowest])
    send_s = _send_seconds(job, links)
    sends_s = send_s * (1.0 if job.is_lazy else 0.5)
    micro_s = busy[slowest] + exposed_gather_s + sends_s
    bubble = _bubble(job, forward_s, backward_s)
    work_s = job.num_micro * micro_s / (1.0 - bubble)

    sync_s = _sync_seconds(job, slowest, links)
    # Buckets are reduced during the last backward pass, except on lazy devices (parallel/data_parallel.py).
    overlap = 0.0 if job.is_lazy else speed.overlap
    exposed_sync_s = max(sync_s * (1.0 - overlap), sync_s - busy[slowest] * 2 / 3)
    update_s = _update_seconds(job, slowest)
    step_s = work_s + exposed_sync_s + update_s
    waiting = 1.0 - job.num_micro * sum(each + exposed_gather_s + sends_s for each in busy) / (parallel.pp * work_s)
    flops = flops_per_token(job.decoder, job.config.train.seq_len) * job.tokens_per_step
    dp_s = sync_s + job.num_micro * gather_s
    dp_exposed_s = exposed_sync_s + job.num_micro * exposed_gather_s
    tp_own_s = sum(_own_values(job, tp_s, slowest))
    return StepTime(
        step_s=step_s,
        compute_s=job.num_micro * (busy[slowest] - tp_own_s),
        update_s=update_s,
        bubble=waiting,
        traffic=_traffic(job, slowest, tp_own_s * job.num_micro, (dp_s, dp_exposed_s), (send_s, sends_s)),
        mfu=flops / (step_s * job.world * job.machine.device_flops),
        basis=speed.basis,
    )


def _own_values(job: Job, values: list[float], rank: int) -> list[float]:
    return values[rank :: job.config.parallel.pp]


def _own(job: Job, forward_s: list[float], backward_s: list[float], rank: int) -> list[tuple[float, float]]:
    return list(zip(_own_values(job, forward_s, rank), _own_values(job, backward_s, rank), strict=True))


def _flops(job: Job, num_blocks: int, *, has_head: bool) -> tuple[float, float]:
    """Operations of a part's forward and backward pass for a micro-batch, over all tensor parallel ranks."""
    per_token = costs(job.decoder, job.config.train.seq_len)
    block, head = per_token.block * num_blocks, per_token.head if has_head else 0
    attention = 2 * job.decoder.num_heads * job.decoder.head_size * job.config.train.seq_len * num_blocks
    again = {"none": 0, "selective": attention, "full": block}[job.config.train.remat]
    return job.micro_tokens * (block + head), job.micro_tokens * (2 * (block + head) + again)


def _tp_seconds(job: Job, num_blocks: int, links: Links) -> float:
    """Seconds of the tensor parallel transfers of a micro-batch; all count as exposed, as `SPEEDS` was calibrated."""
    return ring_s(job, job.config.parallel.tp, tp_bytes(job, num_blocks), links, spread=1)


def _send_seconds(job: Job, links: Links) -> float:
    """Seconds of a rank's transfers to neighbouring stages for one micro-batch; all ranks of a machine send at once."""
    parallel = job.config.parallel
    if parallel.pp == 1:
        return 0.0
    per_micro = pp_bytes(job) / job.num_micro
    spread = parallel.tp * parallel.dp
    if link_of(job, 2, spread) == "device":
        return per_micro / links.device
    return per_micro * min(job.world, job.machine.devices) / links.network if links.network else float("inf")


def _sync_seconds(job: Job, stage: int, links: Links) -> float:
    """Seconds of the transfers over data parallel ranks that each step has once."""
    parallel = job.config.parallel
    within, across = sync_bytes(job, stage)
    replicas = parallel.dp // job.shard_size
    return ring_s(job, parallel.dp, within, links, spread=parallel.tp) + ring_s(
        job, replicas, across, links, spread=parallel.tp * job.shard_size
    )


def _bubble(job: Job, forward_s: list[float], backward_s: list[float]) -> float:
    """Share of the slowest stage's time in which it waits, by `PipelineCosts.ideal_bubble`."""
    parallel = job.config.parallel
    if parallel.pp == 1:
        return 0.0
    splits = parallel.schedule == "zero_bubble"
    backward = [each / 2 for each in backward_s] if splits else backward_s
    none = [0] * len(forward_s)
    pipeline = PipelineCosts(
        pp_size=parallel.pp,
        virtual_pp=parallel.virtual_pp,
        num_micro=job.num_micro,
        forward_s=forward_s,
        backward_s=backward,
        kept_bytes=none,
        order=parallel.schedule,
        weight_s=backward if splits else (),
        postponed_bytes=none if splits else (),
        boundary_bytes=0,
    )
    return pipeline.ideal_bubble


def _update_seconds(job: Job, stage: int) -> float:
    """Seconds of the update, bound by the memory: state is read and written, gradients are read."""
    moved = 2 * (optimizer_bytes(job, stage) + params_bytes(job, stage)) + reduced_bytes(job, stage)
    return moved / (job.machine.memory_bytes_s * MEMORY_SHARE)


def _traffic(
    job: Job, stage: int, tp_s: float, dp: tuple[float, float], pp: tuple[float, float]
) -> tuple[Traffic, ...]:
    parallel, found = job.config.parallel, []
    if parallel.tp > 1:
        sent = job.num_micro * sum(tp_bytes(job, len(part.blocks)) for part in job.parts[stage])
        found.append(Traffic("tp", link_of(job, parallel.tp, 1), int(sent), tp_s, 0.0))
    if parallel.dp > 1:
        seconds, exposed = dp
        sent = sum(sync_bytes(job, stage)) + job.num_micro * gather_bytes(job, stage)
        hidden = 1.0 - exposed / seconds if seconds else 0.0
        found.append(Traffic("dp", link_of(job, parallel.dp, parallel.tp), int(sent), seconds, hidden))
    if parallel.pp > 1:
        seconds, exposed = (job.num_micro * each for each in pp)
        link = link_of(job, 2, parallel.tp * parallel.dp)
        hidden = 1.0 - exposed / seconds if seconds else 0.0
        found.append(Traffic("pp", link, int(pp_bytes(job)), seconds, hidden))
    return tuple(found)
