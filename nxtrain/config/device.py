"""Rules on attention kernels, compiled graphs, float8 and layer sets, which not every device supports."""

from __future__ import annotations

from collections.abc import Iterator

from nxtrain.common.errors import Problem
from nxtrain.config.schema import ATTENTION, FULLY_SHARDED, ON_GPUS, ON_XLA, RunConfig


def kernels_and_graphs(config: RunConfig) -> Iterator[Problem]:
    """Check attention kernels and compile options against the backend, and yield the problems."""
    backend = config.backend
    if backend.name != "auto" and backend.attention not in ATTENTION[backend.name]:
        those = [name for name, kernels in ATTENTION.items() if backend.attention in kernels]
        reason = f"{backend.attention} is a kernel of backend.name={' and '.join(those)}, not of {backend.name}"
        yield Problem("backend.attention", reason, hint=f"use {' or '.join(ATTENTION[backend.name])}")
    if backend.deterministic and backend.name in (*ON_XLA, "neuron-native"):
        reason = f"true selects deterministic torch kernels for GPUs, and backend.name={backend.name} has none"
        yield Problem("backend.deterministic", reason, hint="use false")
    elif backend.deterministic and backend.attention in ("cudnn", "flash3", "flash4"):
        reason = f"true needs gradients summed in a fixed order, which {backend.attention} does not guarantee"
        yield Problem("backend.attention", reason, hint="use auto, flash, flex or plain")
    if config.compile.torch_compile and config.backend.name in ON_XLA:
        reason = f"backend.name={config.backend.name} records whole steps for its own compiler"
        yield Problem("compile.torch_compile", reason, hint="use false; cpu, cuda and neuron-native have the choice")
    parallel = config.parallel
    if parallel.async_tp and not (config.compile.torch_compile and parallel.sequence_parallel and parallel.tp > 1):
        reason = (
            "overlaps the collectives of sequence_parallel with matrix products, in blocks compiled by torch.compile"
        )
        hint = "use false, or compile.torch_compile=true, parallel.sequence_parallel=true and parallel.tp=2 or more"
        yield Problem("parallel.async_tp", reason, hint=hint)
    elif parallel.async_tp and config.backend.name not in ("auto", ON_GPUS):
        reason = f"needs GPUs that access each other's memory, not backend.name={config.backend.name}"
        yield Problem("parallel.async_tp", reason, hint="use false, or backend.name=cuda")
    if config.compile.torch_compile == "step" and parallel.pp > 1:
        reason = f"step makes one graph from tokens to the loss, but pp={parallel.pp} cuts it into stages"
        yield Problem("compile.torch_compile", reason, hint="use true, or parallel.pp=1")


def float8(config: RunConfig) -> Iterator[Problem]:
    """Check matrix products in float8 against the backend and other keys, and yield the problems."""
    recipe, backend = config.precision.fp8, config.backend
    if recipe == "none":
        return
    if backend.name not in ("auto", "cpu", ON_GPUS):
        reason = f"{recipe} needs float8 kernels of GPUs, which backend.name={backend.name} lacks"
        yield Problem("precision.fp8", reason, hint="use none; cuda has them, and cpu emulates them")
    if config.precision.params == "fp16":
        reason = f"{recipe} is for GPUs with bf16, and params=fp16 is for those without"
        yield Problem("precision.fp8", reason, hint="use precision.params=bf16, or none")
    elif config.precision.params == "fp32" and recipe != "tensorwise" and backend.name == ON_GPUS:
        reason = f"{recipe}, but torch's kernel returns bf16, and params=fp32"
        yield Problem("precision.fp8", reason, hint="use precision.params=bf16, or tensorwise")
    if config.finetune.method == "qlora":
        reason = f"{recipe} casts weights of linear layers, and finetune.method=qlora keeps these in NF4"
        yield Problem("precision.fp8", reason, hint="use finetune.method=lora, or none")
    if backend.layers == "nxd":
        reason = f"{recipe} changes nxtrain's own layers, which backend.layers=nxd replaces"
        yield Problem("precision.fp8", reason, hint="use backend.layers=native, or none")
    if config.parallel.async_tp:
        reason = f"{recipe} has casts between a collective and its product, which async_tp cannot join"
        yield Problem("parallel.async_tp", reason, hint="use false, or precision.fp8=none")


def layers(config: RunConfig) -> Iterator[Problem]:
    """Check the use of NeuronX Distributed's layers, and yield the problems."""
    if config.backend.layers != "nxd":
        return
    if config.backend.name not in ("auto", "neuron", "cpu"):  # on cpu it runs for tests
        reason = f"nxd runs on the backend neuron, not on {config.backend.name}"
        yield Problem("backend.layers", reason, hint="use backend.layers=native")
    elif config.parallel.shard in FULLY_SHARDED:
        reason = f"nxd has layers with whole parameters, but parallel.shard={config.parallel.shard} shards them"
        yield Problem("backend.layers", reason, hint="use backend.layers=native, or parallel.shard=zero1")
