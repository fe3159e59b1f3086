"""Search for the layouts of a run on its machines: feasible layouts by speed, and reasons against all others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from nxtrain.common.dimensions import Dimensions, is_matrix
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.machines import Machine
from nxtrain.common.mesh import Mesh, divisors
from nxtrain.config.check import layout
from nxtrain.config.finetune import quantized_cut
from nxtrain.config.schema import FULLY_SHARDED, ParallelConfig, RunConfig
from nxtrain.config.stages import order, stages
from nxtrain.parallel.schedule import Order
from nxtrain.plan.job import Job
from nxtrain.plan.memory import rank_bytes
from nxtrain.plan.predict import Assumptions, Prediction, layout_json
from nxtrain.plan.shapes import axis_of
from nxtrain.plan.speed import step_time

REMATS: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
MAX_PP = 64
MAX_MICRO_BATCH = 8
MIN_POSITIONS = 4096
"""Fewest positions of a sequence per rank for which a search tries context parallelism."""

CHUNKS = (1, 2, 4)
"""Values of `parallel.virtual_pp` that a search tries."""


@dataclass(frozen=True)
class Rejected:
    """Layout that cannot run, with the reason."""

    job: Job
    reason: str


@dataclass(frozen=True)
class SearchResult:
    """Layouts that a search found.

    Args:
        layouts: Predictions of layouts that fit, fastest first.
        rejected: Other layouts with their reasons.
    """

    layouts: tuple[Prediction, ...]
    rejected: tuple[Rejected, ...]

    @property
    def reason(self) -> str:
        """Explanation of the fastest layout: its longest part of a step, and the part that slows the next layout."""
        if not self.layouts:
            return ""
        best, *others = self.layouts
        parts = best.time.parts
        longest = max(parts, key=lambda name: parts[name])
        said = f"{_layout(best.job)} is fastest: {longest} is {parts[longest] / best.time.step_s:.0%} of its step."
        if not others:
            return said
        second = others[0]
        lost = {name: seconds - parts.get(name, 0.0) for name, seconds in second.time.parts.items()}
        slowed = max(lost, key=lambda name: lost[name])
        more = second.time.step_s / best.time.step_s - 1.0
        return f"{said} The next, {_layout(second.job)}, takes {more:.1%} longer, most of it by {slowed}."

    def to_json(self) -> dict[str, Any]:
        """Result of the search as a JSON object."""
        return {
            "reason": self.reason,
            "layouts": [layout.to_json() for layout in self.layouts],
            "rejected": [
                {"method": bad.job.method, "parallel": layout_json(bad.job), "reason": bad.reason}
                for bad in self.rejected
            ],
        }


def _layout(job: Job) -> str:
    parallel, train = job.config.parallel, job.config.train
    degrees = f"{parallel.degrees} shard={parallel.shard}"
    return f"{degrees} micro_batch={train.micro_batch} remat={train.remat}"


def search(
    dimensions: Dimensions, machine: Machine, nodes: int, config: RunConfig, assumed: Assumptions
) -> SearchResult:
    """Search over degrees, sharding modes, pipeline schedules, micro-batches and recomputation that use all devices.

    For each set of degrees and sharding, only the fastest fitting schedule, micro-batch and recomputation is kept.
    """
    layouts: list[Prediction] = []
    rejected: list[Rejected] = []
    for job in _degrees(dimensions, machine, nodes, config):
        problems = list(impossible(job))
        if problems:
            rejected.append(Rejected(job, "; ".join(problem.reason for problem in problems)))
            continue
        fitting, least = _try(job, assumed)
        if fitting:
            layouts.append(min(fitting, key=lambda layout: layout.time.step_s))
        else:
            rejected.append(Rejected(least, Prediction.of(least, assumed).reasons[0]))
    layouts.sort(key=lambda layout: layout.time.step_s)
    return SearchResult(tuple(layouts), tuple(rejected))


def _try(job: Job, assumed: Assumptions) -> tuple[list[Prediction], Job]:
    """Predict the variants of a layout in schedule, micro-batch and recomputation.

    Recomputation only costs time, so for each schedule and micro-batch only the variant with the least recomputation
    that fits is kept.

    Returns:
        Predictions of the variants that fit, and the variant that needs least memory if none fits.
    """
    fitting: list[Prediction] = []
    least, least_bytes = job, -1
    for details in _details(job):
        for detail in details:
            stage, num_bytes = rank_bytes(detail)
            if num_bytes.total <= job.machine.device_bytes:
                fitting.append(Prediction(detail, assumed, stage, num_bytes, step_time(detail)))
                break
            if least_bytes < 0 or num_bytes.total < least_bytes:
                least, least_bytes = detail, num_bytes.total
    return fitting, least


def impossible(job: Job) -> Iterator[Problem]:
    """Reasons why a layout cannot exist at any memory size: rules of the configuration and of the machines."""
    parallel, dimensions = job.config.parallel, job.dimensions
    kv_heads = dimensions.num_kv_heads
    if dimensions.num_heads % parallel.tp:
        reason = f"tp={parallel.tp} does not divide {dimensions.num_heads} attention heads"
        yield Problem("parallel.tp", reason, hint=_degrees_of(dimensions))
    elif kv_heads % parallel.tp and parallel.tp % kv_heads:
        reason = f"neither of tp={parallel.tp} and {kv_heads} key/value heads divides the other"
        yield Problem("parallel.tp", reason, hint=_degrees_of(dimensions))
    elif job.method == "qlora":
        # The first matrix of a block that tensor parallelism cuts inside a quantized block.
        for name, spec in job.stages[0].block_specs(parallel.tp).items():
            if is_matrix(spec):
                problems = list(quantized_cut(name.split(".")[1], spec, axis_of(parallel.tp)))
                if problems:
                    yield problems[0]
                    break
    tp = parallel.tp
    pp = parallel.pp
    dp = parallel.dp
    cp = parallel.cp
    ep = parallel.ep
    try:
        Mesh.build(job.world, 0, tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, shard=job.shard_size)
    except ConfigError as error:
        yield from error.problems
    yield from stages(parallel, dimensions.num_layers)
    if job.nodes > 1 and not job.machine.network_bytes_s:
        reason = f"{job.nodes} machines cannot train together: {job.machine.name} has no network for collectives"
        yield Problem("cluster.nodes", reason, hint="use one machine, or another instance")
    backend = job.config.backend.model_copy(update={"name": job.backend})
    yield from layout(job.config.model_copy(update={"backend": backend}), has_weights=False)


def _degrees_of(dimensions: Dimensions) -> str:
    kv_heads = dimensions.num_kv_heads
    fitting = [tp for tp in divisors(dimensions.num_heads) if not (kv_heads % tp and tp % kv_heads)]
    return f"use {', '.join(map(str, fitting))}"


def _degrees(dimensions: Dimensions, machine: Machine, nodes: int, config: RunConfig) -> Iterator[Job]:
    lazy = Job(dimensions, machine, nodes, config).is_lazy
    seq_len, mixture = config.train.seq_len, dimensions.mixture
    most_cp = max(1, seq_len // MIN_POSITIONS)  # so that each rank has at least `MIN_POSITIONS` positions
    for tp, pp, copies in _products(dimensions, machine, nodes):
        context_degrees = [cp for cp in divisors(copies) if cp <= most_cp and seq_len % cp == 0]
        expert_degrees = [1]
        if mixture is not None:
            expert_degrees = divisors(math.gcd(copies, mixture.num_experts))
        for cp, ep in product(context_degrees, expert_degrees):
            modes = ["none"]
            if copies > 1:
                modes.append("zero1")
            if copies > 1 and not lazy:
                modes += ["grad_op", "full"]
                if nodes > 1:
                    modes.append("hybrid")
            for mode in modes:
                changes: dict[str, Any] = {"tp": tp, "pp": pp, "dp": copies // cp, "cp": cp, "ep": ep, "shard": mode}
                changes["sequence_parallel"] = tp > 1
                if mode not in FULLY_SHARDED:
                    changes |= {"prefetch": 1, "forward_prefetch": True, "backward_prefetch": "before"}
                changes |= {
                    "virtual_pp": 1,
                    "schedule": "1f1b",
                    "pipeline_cuts": (),
                    "shard_size": 0,
                    "unit_params": 0,
                    "offload": (),
                }
                parallel = config.parallel.model_copy(update=changes)
                train = config.train.model_copy(update={"micro_batch": 1})
                yield Job(dimensions, machine, nodes, config.model_copy(update={"parallel": parallel, "train": train}))


def _products(dimensions: Dimensions, machine: Machine, nodes: int) -> Iterator[tuple[int, int, int]]:
    """Degrees of tp and pp, and the number of remaining ranks for dp x cp."""
    world = machine.devices * nodes
    for tp in divisors(machine.devices):
        for pp in divisors(world // tp):
            if pp <= min(MAX_PP, dimensions.num_layers):
                yield tp, pp, world // (tp * pp)


def _details(job: Job) -> Iterator[Iterator[Job]]:
    """Variants of a layout: a group for each schedule and micro-batch, with one variant for each recomputation."""
    per_rank = job.config.train.global_batch // job.config.parallel.dp
    for virtual_pp, schedule in orders(job):
        parallel = job.config.parallel.model_copy(update={"virtual_pp": virtual_pp, "schedule": schedule})
        for micro_batch in [size for size in divisors(per_rank) if size <= MAX_MICRO_BATCH]:
            yield (_with(job, parallel, micro_batch, remat) for remat in REMATS)


def _with(job: Job, parallel: ParallelConfig, micro_batch: int, remat: str) -> Job:
    train = job.config.train.model_copy(update={"micro_batch": micro_batch, "remat": remat})
    return replace(job, config=job.config.model_copy(update={"parallel": parallel, "train": train}))


def orders(job: Job) -> list[tuple[int, Order]]:
    """Values of `virtual_pp` and of the schedule that the number of blocks and the layout allow."""
    parallel = job.config.parallel
    if parallel.pp == 1:
        return [(1, "1f1b")]
    results: list[tuple[int, Order]] = [
        (chunks, "1f1b") for chunks in CHUNKS if parallel.pp * chunks <= job.dimensions.num_layers
    ]
    postponing = job.config.model_copy(update={"parallel": parallel.model_copy(update={"schedule": "zero_bubble"})})
    return results if job.is_lazy or any(order(postponing)) else [*results, (1, "zero_bubble")]
