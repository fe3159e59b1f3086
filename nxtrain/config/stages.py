"""Rules of pipeline parallelism: number of stages and blocks, transfers of the backend, zero-bubble schedule."""

from __future__ import annotations

from collections.abc import Iterator

from nxtrain.common.errors import Problem
from nxtrain.config.schema import FULLY_SHARDED, ON_XLA, ParallelConfig, RunConfig


def stages(parallel: ParallelConfig, num_layers: int) -> Iterator[Problem]:
    """Check the division of a model's blocks into pipeline stages, and yield the problems."""
    pp = parallel.pp
    virtual_pp = parallel.virtual_pp
    cuts = parallel.pipeline_cuts
    num_chunks = pp * virtual_pp
    if pp == 1 and virtual_pp > 1:
        reason = f"{virtual_pp} chunks interleave with chunks of other pipeline stages, but pp=1 has one stage"
        yield Problem("parallel.virtual_pp", reason, hint="use parallel.virtual_pp=1, or parallel.pp=2 or more")
    elif num_chunks > num_layers:
        chunks = " stages"
        if virtual_pp > 1:
            chunks = f" x virtual_pp={virtual_pp} = {num_chunks} chunks"
        reason = f"pp={pp}{chunks} cannot share model.config.num_hidden_layers={num_layers}: each has one block or more"
        key, most = "parallel.pp", num_layers
        if pp <= num_layers:
            key, most = "parallel.virtual_pp", num_layers // pp
        yield Problem(key, reason, hint=f"use at most {key}={most}")
    if cuts and num_chunks == 1:
        reason = f"{list(cuts)} lists where pipeline stages begin, but pp=1 has one stage"
        yield Problem("parallel.pipeline_cuts", reason, hint="leave it out, or use parallel.pp=2 or more")
    elif cuts and (len(cuts) != num_chunks - 1 or list(cuts) != sorted(set(cuts)) or cuts[-1] >= num_layers):
        reason = (
            f"{list(cuts)} lists where all chunks but the first begin. With pp={pp} x virtual_pp={virtual_pp} it must "
            f"have {num_chunks - 1}, ascending and below model.config.num_hidden_layers={num_layers}"
        )
        yield Problem("parallel.pipeline_cuts", reason, hint="leave it out to cut by cost")


def transport(config: RunConfig) -> Iterator[Problem]:
    """Check the transfers between pipeline stages against the backend, and yield the problems."""
    pp = config.parallel.pp
    if pp > 1 and pp % 2 and config.backend.name in ON_XLA:
        reason = f"{pp} is odd, and on backend.name={config.backend.name} stages transfer in pairs, so it must be even"
        yield Problem("parallel.pp", reason, hint=f"use parallel.pp={pp - 1} or {pp + 1}")


def order(config: RunConfig) -> Iterator[Problem]:
    """Check the zero-bubble schedule, which postpones weight gradients, and yield the problems."""
    parallel, backend = config.parallel, config.backend
    if parallel.schedule != "zero_bubble":
        return

    def problem(reason: str, instead: str) -> Problem:
        hint = f"use {instead}, or parallel.schedule=1f1b"
        return Problem("parallel.schedule", f"zero_bubble {reason}", hint=hint)

    if parallel.pp == 1:
        yield problem("fills the bubble of a pipeline, but pp=1 has no bubble", "parallel.pp=2 or more")
    if parallel.virtual_pp > 1:
        yield problem(f"has one chunk for each stage, but virtual_pp={parallel.virtual_pp}", "parallel.virtual_pp=1")
    if backend.name in ON_XLA:
        where = "backend.name=cpu, cuda or neuron-native"
        yield problem(
            f"overlaps transfers with computation, but on backend.name={backend.name} a transfer blocks both ranks",
            where,
        )
    if backend.layers == "nxd":
        yield problem(
            "splits the backward pass of nxtrain's own layers, but backend.layers=nxd", "backend.layers=native"
        )
    if parallel.shard in FULLY_SHARDED:
        reason = (
            f"needs whole parameters after the backward pass, but shard={parallel.shard} frees and reduces them there"
        )
        yield problem(reason, "parallel.shard=zero1")
    if config.compile.torch_compile:
        reason = "splits the backward pass of layers, but compile.torch_compile makes one graph of each block"
        yield problem(reason, "compile.torch_compile=false")
