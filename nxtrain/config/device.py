"""Rules on kernels, graphs and layers, which not every device has."""

from __future__ import annotations

from collections.abc import Iterator

from nxtrain.common.errors import Problem
from nxtrain.config.schema import ATTENTION, FULLY_SHARDED, ON_GPUS, ON_XLA, RunConfig


def kernels_and_graphs(config: RunConfig) -> Iterator[Problem]:
    """Problems of kernels that a device lacks, and of graphs that its compiler cannot make."""
    backend = config.backend
    if backend.name != "auto" and backend.attention not in ATTENTION[backend.name]:
        those = [name for name, kernels in ATTENTION.items() if backend.attention in kernels]
        reason = f"{backend.attention} is a kernel of backend.name={' and '.join(those)}, not of {backend.name}"
        yield Problem("backend.attention", reason, hint=f"use {' or '.join(ATTENTION[backend.name])}")
    if backend.deterministic and backend.name in (*ON_XLA, "neuron-native"):
        reason = f"true is a switch of torch's kernels for GPUs, and backend.name={backend.name} has none"
        yield Problem("backend.deterministic", reason, hint="use false")
    elif backend.deterministic and backend.attention in ("cudnn", "flash3", "flash4"):
        reason = f"true needs gradients whose terms have one order, which {backend.attention} does not promise"
        yield Problem("backend.attention", reason, hint="use auto, flash, flex or plain")
    if config.compile.torch_compile and config.backend.name in ON_XLA:
        reason = f"backend.name={config.backend.name} records whole steps, and its own compiler gets them"
        yield Problem("compile.torch_compile", reason, hint="use false; cpu, cuda and neuron-native have the choice")
    parallel = config.parallel
    if parallel.async_tp and not (config.compile.torch_compile and parallel.sequence_parallel and parallel.tp > 1):
        reason = "overlaps the collectives of sequence_parallel with products, in blocks that torch.compile compiles"
        hint = "use false, or compile.torch_compile=true, parallel.sequence_parallel=true and parallel.tp=2 or more"
        yield Problem("parallel.async_tp", reason, hint=hint)
    elif parallel.async_tp and config.backend.name not in ("auto", ON_GPUS):
        reason = f"is for GPUs, whose memory their peers can reach, not for backend.name={config.backend.name}"
        yield Problem("parallel.async_tp", reason, hint="use false, or backend.name=cuda")
    if config.compile.torch_compile == "step" and parallel.pp > 1:
        reason = f"step makes one graph from tokens to the loss, but pp={parallel.pp} cuts it into stages"
        yield Problem("compile.torch_compile", reason, hint="use true, or parallel.pp=1")


def float8(config: RunConfig) -> Iterator[Problem]:
    """Problems of products in float8."""
    recipe, backend = config.precision.fp8, config.backend
    if recipe == "none":
        return
    if backend.name not in ("auto", "cpu", ON_GPUS):
        reason = f"{recipe} multiplies by kernels of GPUs, which backend.name={backend.name} lacks"
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
        reason = f"{recipe} changes nxtrain's own layers, and backend.layers=nxd has others"
        yield Problem("precision.fp8", reason, hint="use backend.layers=native, or none")
    if config.parallel.async_tp:
        reason = f"{recipe} has casts between a collective and its product, which async_tp cannot join"
        yield Problem("parallel.async_tp", reason, hint="use false, or precision.fp8=none")


def layers(config: RunConfig) -> Iterator[Problem]:
    """Problems of the layers of NeuronX Distributed."""
    if config.backend.layers != "nxd":
        return
    if config.backend.name not in ("auto", "neuron", "cpu"):  # on cpu it runs for tests
        reason = f"nxd runs on the backend neuron, not on {config.backend.name}"
        yield Problem("backend.layers", reason, hint="use backend.layers=native")
    elif config.parallel.shard in FULLY_SHARDED:
        reason = f"nxd has layers of whole parameters, but parallel.shard={config.parallel.shard} cuts them further"
        yield Problem("backend.layers", reason, hint="use backend.layers=native, or parallel.shard=zero1")
