"""Layouts of a run on its machines: feasible ones by predicted speed, and a reason for every other one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from nxtrain.config.schema import FULLY_SHARDED, RunConfig
from nxtrain.config.stages import order, stages, transport
from nxtrain.errors import Problem
from nxtrain.family import Decoder
from nxtrain.mesh import divisors
from nxtrain.plan.hardware import Machine
from nxtrain.plan.job import Job
from nxtrain.plan.memory import rank_bytes
from nxtrain.plan.predict import Assumptions, Prediction, layout_json
from nxtrain.plan.speed import step_time

REMATS: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
MAX_PP = 64
MAX_MICRO_BATCH = 8


@dataclass(frozen=True)
class Rejected:
    """A layout that cannot run, with the reason."""

    job: Job
    reason: str


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Args:
        layouts: Predictions of layouts that fit, fastest first.
        rejected: Other layouts with their reasons.
    """

    layouts: tuple[Prediction, ...]
    rejected: tuple[Rejected, ...]

    def to_json(self) -> dict[str, Any]:
        """The result as JSON."""
        return {
            "layouts": [found.to_json() for found in self.layouts],
            "rejected": [{"parallel": layout_json(each.job), "reason": each.reason} for each in self.rejected],
        }


def search(decoder: Decoder, machine: Machine, nodes: int, config: RunConfig, assumed: Assumptions) -> Found:
    """Try the degrees, modes of sharding, micro-batches and recomputation that use all devices.

    Of the micro-batches and the recomputation of one set of degrees, the fastest that fits is kept.
    """
    layouts: list[Prediction] = []
    rejected: list[Rejected] = []
    for job in _degrees(decoder, machine, nodes, config):
        if problems := list(impossible(job)):
            rejected.append(Rejected(job, "; ".join(problem.reason for problem in problems)))
            continue
        tried = list(_details(job))
        sized = [(each, *rank_bytes(each)) for each in tried]
        fitting = [
            Prediction(each, assumed, stage, found, step_time(each))
            for each, stage, found in sized
            if found.total <= machine.device_bytes
        ]
        if fitting:
            layouts.append(min(fitting, key=lambda found: found.time.step_s))
        else:
            least, _, _ = min(sized, key=lambda each: each[2].total)
            rejected.append(Rejected(least, Prediction.of(least, assumed).reasons[0]))
    layouts.sort(key=lambda found: found.time.step_s)
    return Found(tuple(layouts), tuple(rejected))


def impossible(job: Job) -> Iterator[Problem]:
    """Reasons why a layout cannot exist, whatever its memory."""
    parallel, train, decoder = job.config.parallel, job.config.train, job.decoder
    kv_heads = decoder.num_kv_heads
    if decoder.num_heads % parallel.tp:
        yield Problem("parallel.tp", f"tp={parallel.tp} does not divide {decoder.num_heads} attention heads")
    elif kv_heads % parallel.tp and parallel.tp % kv_heads:
        yield Problem("parallel.tp", f"neither of tp={parallel.tp} and {kv_heads} key/value heads divides the other")
    yield from stages(parallel, decoder.num_layers)
    if train.global_batch % (train.micro_batch * parallel.dp):
        yield Problem(
            "train.global_batch",
            f"{train.global_batch} is not a multiple of micro_batch={train.micro_batch} x dp={parallel.dp} = "
            f"{train.micro_batch * parallel.dp}",
        )
    if parallel.sequence_parallel and train.seq_len % parallel.tp:
        yield Problem("train.seq_len", f"tp={parallel.tp} does not divide seq_len={train.seq_len}")
    if job.is_lazy and parallel.shard in FULLY_SHARDED:
        yield Problem("parallel.shard", f"{parallel.shard} does not run on PyTorch/XLA; use zero1")
    if job.nodes > 1 and not job.machine.network_bytes_s:
        reason = f"{job.nodes} machines cannot train together: {job.machine.name} has no network for collectives"
        yield Problem("cluster.nodes", reason, hint="use one machine, or another instance")
    yield from transport(job.config)
    yield from order(job.config)


def _degrees(decoder: Decoder, machine: Machine, nodes: int, config: RunConfig) -> Iterator[Job]:
    world = machine.devices * nodes
    lazy = Job(decoder, machine, nodes, config).is_lazy
    for tp in divisors(machine.devices):
        for pp in divisors(world // tp):
            if pp > min(MAX_PP, decoder.num_layers):
                continue
            dp = world // (tp * pp)
            modes = ["none"] if dp == 1 else ["none", "zero1"] if lazy else ["none", "zero1", "grad_op", "full"]
            if nodes > 1 and not lazy and dp > 1:
                modes.append("hybrid")
            for mode in modes:
                changes: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp, "shard": mode, "sequence_parallel": tp > 1}
                changes |= {"virtual_pp": 1, "pipeline_cuts": (), "shard_size": 0, "offload": False}
                parallel = config.parallel.model_copy(update=changes)
                train = config.train.model_copy(update={"micro_batch": 1})
                yield Job(decoder, machine, nodes, config.model_copy(update={"parallel": parallel, "train": train}))


def _details(job: Job) -> Iterator[Job]:
    """The layout with every micro-batch that divides the batch, and with every mode of recomputation."""
    per_rank = job.config.train.global_batch // job.config.parallel.dp
    for micro_batch in [each for each in divisors(per_rank) if each <= MAX_MICRO_BATCH]:
        for remat in REMATS:
            train = job.config.train.model_copy(update={"micro_batch": micro_batch, "remat": remat})
            yield Job(job.decoder, job.machine, job.nodes, job.config.model_copy(update={"train": train}))
