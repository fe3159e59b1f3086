"""Predicted time of a training step: computation, communication, pipeline bubble and update.

`SPEEDS` has all constants that describe software efficiency. One row serves every model, layout and number of machines
of a kind of chip. docs/planning.md compares the predictions with published runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nxtrain.plan.context import context_bytes
from nxtrain.plan.experts import exchange_bytes
from nxtrain.plan.job import Job
from nxtrain.plan.memory import optimizer_bytes, params_bytes
from nxtrain.plan.moments import reduced_bytes
from nxtrain.plan.muon import muon_work, products_s
from nxtrain.plan.pipeline import PipelineCosts
from nxtrain.plan.traffic import (
    Links,
    Traffic,
    exchange_s,
    gather_bytes,
    link_of,
    pp_bytes,
    ring_s,
    sync_bytes,
    tp_bytes,
)
from nxtrain.plan.work import Work, model_flops_per_token, passes, restored_bytes


@dataclass(frozen=True)
class Speed:
    """Efficiency constants of a kind of chip.

    Args:
        products: Share of the peak that matrix products reach.
        attention: Share of the peak that causal attention reaches.
        link: Share of the bandwidth between devices that collectives reach.
        network: Share of the network's bandwidth that collectives reach.
        overlap: Largest share of a transfer that concurrent computation hides.
        basis: Origin of the constants, as text.
    """

    products: float
    attention: float
    link: float
    network: float
    overlap: float
    basis: str


SPEEDS = {
    "trn1": Speed(0.50, 0.30, 0.35, 0.8, 0.0, "calibrated on published runs on trn1"),
    "trn2": Speed(0.50, 0.30, 0.35, 0.8, 0.0, "those of trn1: no training throughput is published for this chip"),
    "trn3": Speed(0.50, 0.30, 0.35, 0.8, 0.0, "those of trn1: no training throughput is published for this chip"),
    "a100": Speed(0.80, 0.50, 0.6, 0.7, 0.9, "calibrated on published runs on A100"),
    "hopper": Speed(0.58, 0.30, 0.7, 0.7, 0.9, "calibrated on published runs on H100"),
}
"""Efficiency constants by kind of chip."""

OTHER = Speed(0.69, 0.40, 0.65, 0.7, 0.9, "between those of A100 and H100: nothing published was compared")
"""Efficiency constants of all other chips."""

MEMORY_SHARE = 0.75
"""Share of the memory bandwidth that memory-bound operations reach: the update, and operations between products."""

COMPILED_PASSES, EAGER_PASSES = 2.5, 4.5
"""Factors by which compiled and eager kernels move more bytes than one read and one write of each tensor."""


_LINKS = {"none": "no link", "device": "the links of a machine", "network": "the network"}


@dataclass(frozen=True)
class StepTime:
    """Predicted time of a step.

    Args:
        step_s: Seconds of the step.
        compute_s: Seconds of the computations of the slowest stage, recomputation included.
        update_s: Seconds of the update.
        bubble: Share of the pipeline's time in which ranks wait for each other, unequal stages included.
        traffic: Communication by axis and link.
        mfu: Model FLOPs utilization: operations of the model, without recomputation, over those of the peak in
            `step_s`.
        basis: Origin of the constants, as text.
    """

    step_s: float
    compute_s: float
    update_s: float
    bubble: float
    traffic: tuple[Traffic, ...]
    mfu: float
    basis: str

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step by cause; of transfers, only the time that no computation hides."""
        parts = {"computation": self.compute_s, "the update": self.update_s}
        for traffic in self.traffic:
            name = f"{traffic.axis} transfers by {_LINKS[traffic.link]}"
            parts[name] = parts.get(name, 0.0) + traffic.seconds * (1.0 - traffic.hidden)
        return {**parts, "waits of the pipeline": max(0.0, self.step_s - sum(parts.values()))}


@dataclass(frozen=True)
class Overlap:
    """Communication that computation hides in a training library.

    Args:
        tp: Share of the transfers of column layers that their backward products hide.
        cp: Share of the transfers of keys and values that attention hides.
        fused_context: A fused kernel computes attention between context parallel ranks.
    """

    tp: float
    cp: float
    fused_context: bool


class PartTime(NamedTuple):
    """Seconds of a chunk of the model for one micro-batch: forward, backward, and exposed transfers by axis."""

    forward_s: float
    backward_s: float
    tp_s: float
    cp_s: float
    ep_s: float


def step_time(job: Job, *, hides_tp: bool = True, fused_context: bool = False) -> StepTime:
    """Predict the time of a training step.

    Args:
        job: The run.
        hides_tp: Backward passes of column layers hide their transfers, as nxtrain's own layers do on eager devices.
        fused_context: A fused kernel computes attention between context parallel ranks, as in other libraries.
    """
    speed = SPEEDS.get(job.machine.kind, OTHER)
    links = Links(job.machine.link_bytes_s * speed.link, job.machine.network_bytes_s * speed.network)
    parallel = job.config.parallel
    rates = Rates.of(job, speed)

    hidden_share = 0.0 if job.is_lazy else speed.overlap  # lazy devices overlap no transfers with computations
    tp_overlap = hidden_share if hides_tp else 0.0
    cp_overlap = hidden_share if job.cp_method == "ring" else 0.0
    parts = _parts(job, links, rates, Overlap(tp_overlap, cp_overlap, fused_context))
    chunk_s = [part.forward_s + part.backward_s for part in parts]
    busy = [sum(chunk_s[rank :: parallel.pp]) for rank in range(parallel.pp)]
    slowest = busy.index(max(busy))

    gather_s = ring_s(job, job.shard_size, gather_bytes(job, slowest), links, spread=parallel.tp)
    exposed_gather_s = max(gather_s * (1.0 - speed.overlap), gather_s - busy[slowest])
    send_s = _send_seconds(job, links)
    sends_s = send_s * (1.0 if job.is_lazy else 0.5)
    micro_s = busy[slowest] + exposed_gather_s + sends_s
    bubble = _bubble(job, [part.forward_s for part in parts], [part.backward_s for part in parts])
    work_s = job.num_micro * micro_s / (1.0 - bubble)

    sync_s = _sync_seconds(job, slowest, links)
    # Buckets are reduced during the last backward pass.
    exposed_sync_s = max(sync_s * (1.0 - hidden_share), sync_s - busy[slowest] * 2 / 3)
    # The memory bounds the update: state is read and written, gradients are read.
    state_bytes = optimizer_bytes(job, slowest) + params_bytes(job, slowest)
    moved_bytes = 2 * state_bytes + reduced_bytes(job, slowest)
    update_s = moved_bytes / (job.machine.memory_bytes_s * MEMORY_SHARE) + products_s(job, slowest, speed.products)
    update_traffic = tuple(_update_traffic(job, slowest, links))
    step_s = work_s + exposed_sync_s + update_s + sum(one.seconds for one in update_traffic)
    waiting = 1.0 - job.num_micro * sum(one + exposed_gather_s + sends_s for one in busy) / (parallel.pp * work_s)
    flops = model_flops_per_token(job) * job.tokens_per_step
    own = parts[slowest :: parallel.pp]
    tp_own_s, cp_own_s = sum(part.tp_s for part in own), sum(part.cp_s for part in own)
    ep_own_s = sum(part.ep_s for part in own)
    num = job.num_micro
    return StepTime(
        step_s=step_s,
        compute_s=num * (busy[slowest] - tp_own_s - cp_own_s - ep_own_s),
        update_s=update_s,
        bubble=waiting,
        traffic=(
            *_tp_traffic(job, slowest, links, num * tp_own_s),
            *_cp_traffic(job, slowest, links, num * cp_own_s),
            *_ep_traffic(job, slowest, num * ep_own_s),
            *_dp_traffic(job, slowest, (num * gather_s, num * exposed_gather_s), (sync_s, exposed_sync_s)),
            *_pp_traffic(job, num * send_s, num * sends_s),
            *update_traffic,
        ),
        mfu=flops / (step_s * job.world * job.machine.device_flops),
        basis=speed.basis + _float8_basis(job),
    )


def _float8_basis(job: Job) -> str:
    """Note on the origin of the predicted speed of float8 products; empty for a run without float8."""
    if job.config.precision.fp8 == "none":
        return ""
    if job.machine.float8_flops:
        return "; float8 at the same share of its own peak, which was compared with no run"
    return f"; float8 at the speed of bf16, since no peak of {job.machine.name} in float8 is known"


@dataclass(frozen=True)
class Rates:
    """Rates of computation of a tensor parallel group, and rate of a rank's memory.

    Args:
        products, attention: Operations per second of matrix products and of attention.
        float8: Operations per second of float8 products.
        moved: Bytes per second of operations between products, relative to the minimum of bytes.
    """

    products: float
    attention: float
    float8: float
    moved: float

    @staticmethod
    def of(job: Job, speed: Speed) -> Rates:
        """Rates of a run, from its machine's peak and the efficiency constants."""
        peak = job.config.parallel.tp * job.machine.device_flops
        compiled = job.is_trainium or job.config.compile.torch_compile
        moved = job.machine.memory_bytes_s * MEMORY_SHARE / (COMPILED_PASSES if compiled else EAGER_PASSES)
        float8 = job.config.parallel.tp * (job.machine.float8_flops or job.machine.device_flops)
        return Rates(peak * speed.products, peak * speed.attention, float8 * speed.products, moved)

    def seconds(self, work: Work) -> float:
        """Seconds of a forward or backward pass."""
        products_s = (work.products - work.float8) / self.products + work.float8 / self.float8
        return products_s + work.attention / self.attention + work.moved / self.moved


def _parts(job: Job, links: Links, rates: Rates, overlap: Overlap) -> list[PartTime]:
    """Seconds of every chunk of the model for one micro-batch, in the order of the virtual stages."""
    costs: dict[tuple[object, bool], PartTime] = {}
    results = []
    for chunk in range(job.config.parallel.virtual_pp):
        for parts in job.parts:
            blocks, last = parts[chunk].blocks, parts[chunk].last
            kind = tuple(job.dimensions.windows(blocks)), last
            if kind not in costs:
                costs[kind] = _part(job, blocks, last, links, rates, overlap)
            results.append(costs[kind])
    return results


def _part(job: Job, blocks: range, has_head: bool, links: Links, rates: Rates, overlap: Overlap) -> PartTime:
    """Seconds of one chunk of the model for one micro-batch."""
    num_blocks = len(blocks)
    forward, backward = passes(job, blocks, has_head=has_head, fused_context=overlap.fused_context)
    restore_s = restored_bytes(job, num_blocks) / (job.machine.memory_bytes_s * MEMORY_SHARE)
    tp_forward_s, tp_backward_s = _tp_seconds(job, num_blocks, links, overlap.tp, rates.products)
    sent_forward, sent_backward = context_bytes(job, num_blocks)
    cp_forward_s = _cp_seconds(job, sent_forward, links, overlap.cp, forward.attention / rates.attention)
    cp_backward_s = _cp_seconds(job, sent_backward, links, overlap.cp, backward.attention / rates.attention)
    parallel = job.config.parallel
    ep_forward_s, ep_backward_s = (
        exchange_s(job, parallel.ep, sent, links, spread=parallel.tp) for sent in exchange_bytes(job, num_blocks)
    )
    forward_s = rates.seconds(forward) + tp_forward_s + cp_forward_s + ep_forward_s + restore_s
    if job.config.train.remat == "full":
        restore_s *= 2
    backward_s = rates.seconds(backward) + tp_backward_s + cp_backward_s + ep_backward_s + restore_s
    tp_s = tp_forward_s + tp_backward_s
    cp_s = cp_forward_s + cp_backward_s
    ep_s = ep_forward_s + ep_backward_s
    return PartTime(forward_s, backward_s, tp_s, cp_s, ep_s)


def _cp_seconds(job: Job, num_bytes: float, links: Links, overlap: float, attention_s: float) -> float:
    """Seconds of the exposed transfers over cp; attention to one rank's keys hides the transfer of the next rank's."""
    parallel = job.config.parallel
    seconds = ring_s(job, parallel.cp, num_bytes, links, spread=parallel.tp)
    return seconds - min(overlap * seconds, attention_s * (parallel.cp - 1) / parallel.cp)


def _tp_seconds(job: Job, num_blocks: int, links: Links, overlap: float, rate: float) -> tuple[float, float]:
    """Seconds of the exposed tp transfers of some blocks, in the forward and in the backward pass.

    Backward of `parallel/linear.py:_ColumnProduct` gathers the input during one product, and sums the input's gradient
    during the other product. All other transfers are exposed.
    """
    tp = job.config.parallel.tp
    forward, backward, hidden = tp_bytes(job, num_blocks)
    hidden_s = ring_s(job, tp, hidden, links, spread=1)
    products_s = num_blocks * job.micro_tokens * 4 * job.dimensions.column_params / rate
    backward_s = ring_s(job, tp, backward, links, spread=1) - min(overlap * hidden_s, products_s)
    return ring_s(job, tp, forward, links, spread=1), backward_s


def _send_seconds(job: Job, links: Links) -> float:
    """Seconds of a rank's transfers to neighbouring stages per micro-batch; all ranks of a machine send at once."""
    parallel = job.config.parallel
    if parallel.pp == 1:
        return 0.0
    per_micro = pp_bytes(job) / job.num_micro
    spread = parallel.tp * job.copies
    if link_of(job, 2, spread) == "device":
        return per_micro / links.device
    if not links.network:
        return float("inf")
    return per_micro * min(job.world, job.machine.devices) / links.network


def _sync_seconds(job: Job, stage: int, links: Links) -> float:
    """Seconds of the collectives over dp x cp that run once per step."""
    parallel = job.config.parallel
    within, across = sync_bytes(job, stage)
    replicas = job.copies // job.shard_size
    return ring_s(job, job.copies, within, links, spread=parallel.tp) + ring_s(
        job, replicas, across, links, spread=parallel.tp * job.shard_size
    )


def _bubble(job: Job, forward_s: list[float], backward_s: list[float]) -> float:
    """Pipeline bubble, as a share of the slowest stage's time, by `PipelineCosts.ideal_bubble`."""
    parallel = job.config.parallel
    if parallel.pp == 1:
        return 0.0
    weight_s: list[float] = []
    none = [0] * len(forward_s)
    if parallel.schedule == "zero_bubble":
        backward_s = [seconds / 2 for seconds in backward_s]
        weight_s = backward_s
    pipeline = PipelineCosts(
        pp_size=parallel.pp,
        virtual_pp=parallel.virtual_pp,
        num_micro=job.num_micro,
        forward_s=forward_s,
        backward_s=backward_s,
        kept_bytes=none,
        order=parallel.schedule,
        weight_s=weight_s,
        postponed_bytes=none,
        boundary_bytes=0,
    )
    return pipeline.ideal_bubble


def _tp_traffic(job: Job, stage: int, links: Links, exposed_s: float) -> Iterator[Traffic]:
    size = job.config.parallel.tp
    if size > 1:
        blocks = sum(len(part.blocks) for part in job.parts[stage])
        forward, backward, _ = tp_bytes(job, blocks)
        sent = job.num_micro * (forward + backward)
        seconds = ring_s(job, size, sent, links, spread=1)
        yield Traffic("tp", link_of(job, size, 1), int(sent), seconds, _hidden(seconds, exposed_s))


def _cp_traffic(job: Job, stage: int, links: Links, exposed_s: float) -> Iterator[Traffic]:
    parallel = job.config.parallel
    if parallel.cp > 1:
        blocks = sum(len(part.blocks) for part in job.parts[stage])
        sent = job.num_micro * sum(context_bytes(job, blocks))
        seconds = ring_s(job, parallel.cp, sent, links, spread=parallel.tp)
        yield Traffic("cp", link_of(job, parallel.cp, parallel.tp), int(sent), seconds, _hidden(seconds, exposed_s))


def _ep_traffic(job: Job, stage: int, seconds: float) -> Iterator[Traffic]:
    """Traffic of the token exchange between expert parallel ranks; no computation hides it."""
    parallel = job.config.parallel
    if parallel.ep > 1:
        blocks = sum(len(part.blocks) for part in job.parts[stage]) - job.stages[stage].num_dense
        sent = job.num_micro * sum(exchange_bytes(job, blocks))
        yield Traffic("ep", link_of(job, parallel.ep, parallel.tp), int(sent), seconds, 0.0)


def _dp_traffic(job: Job, stage: int, gather_s: tuple[float, float], sync_s: tuple[float, float]) -> Iterator[Traffic]:
    """Traffic over dp: gathers of every micro-batch, and reductions of every step, with their exposed time.

    Hybrid sharding has both, on two links.
    """
    parallel = job.config.parallel
    gathered = job.num_micro * gather_bytes(job, stage)
    if gathered:
        link = link_of(job, job.shard_size, parallel.tp)
        yield Traffic("dp", link, int(gathered), gather_s[0], _hidden(*gather_s))
    sent = sum(sync_bytes(job, stage))
    if sent:
        replicas = job.copies
        if job.is_fully_sharded:
            replicas //= job.shard_size
        link = link_of(job, replicas, parallel.tp * (job.copies // replicas))
        yield Traffic("dp", link, int(sent), sync_s[0], _hidden(*sync_s))


def _update_traffic(job: Job, stage: int, links: Links) -> Iterator[Traffic]:
    """Traffic of Muon's update: rows exchanged to form whole matrices, and results gathered by replicas."""
    groups, parallel = [], job.config.parallel
    for distance, work in zip((1, parallel.ep), muon_work(job, stage), strict=False):
        spread = distance if work.holders > parallel.tp else 1
        groups.append((work.holders, spread, work.exchanged))
        groups.append((work.helpers, distance * work.holders, work.gathered))
    for size, spread, sent in groups:
        if sent:
            seconds = ring_s(job, size, sent, links, spread=spread)
            yield Traffic("update", link_of(job, size, spread), sent, seconds, 0.0)


def _pp_traffic(job: Job, seconds: float, exposed_s: float) -> Iterator[Traffic]:
    parallel = job.config.parallel
    if parallel.pp > 1:
        link = link_of(job, 2, parallel.tp * job.copies)
        yield Traffic("pp", link, int(pp_bytes(job)), seconds, _hidden(seconds, exposed_s))


def _hidden(seconds: float, exposed_s: float) -> float:
    """Share of a transfer's time that computation hides; at least 0, since rounding may enlarge the exposed time."""
    if not seconds:
        return 0.0
    return max(0.0, 1.0 - exposed_s / seconds)
