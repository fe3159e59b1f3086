"""Rules of fine-tuning: methods, backends that restore quantized matrices, and cuts of the blocks of these."""

from __future__ import annotations

from collections.abc import Iterator

from nxtrain.common.errors import Problem
from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import ShardSpec
from nxtrain.config.schema import QUANTIZING, RunConfig

BLOCK = 64
"""Adjacent weights of a matrix in NF4 that share a scale."""


def finetune(config: RunConfig, *, has_weights: bool = True) -> Iterator[Problem]:
    """Problems of [finetune] next to the other keys.

    Args:
        config: All values.
        has_weights: The weights from which the run begins have to be named.
    """
    tuning, model = config.finetune, config.model
    if tuning.method == "full":
        if tuning.adapter:
            reason = f"{tuning.adapter} is an adapter, and finetune.method=full trains none"
            yield Problem("finetune.adapter", reason, hint="use finetune.method=lora or qlora, or leave it out")
        return
    if has_weights and model.init != "hf":
        reason = f"{tuning.method} trains adapters beside given weights, but model.init={model.init}"
        yield Problem("finetune.method", reason, hint="set model.hf=FOLDER and model.init=hf")
    if config.backend.layers == "nxd":
        reason = "adapters are added to nxtrain's own layers, which backend.layers=nxd replaces"
        yield Problem("finetune.method", reason, hint="use backend.layers=native")
    if tuning.method == "qlora" and (config.backend.name not in QUANTIZING or config.compile.torch_compile):
        by = "compile.torch_compile" if config.compile.torch_compile else f"backend.name={config.backend.name}"
        reason = f"bitsandbytes restores NF4 eagerly on cuda and cpu, not with {by}"
        yield Problem("finetune.method", reason, hint="use lora, whose frozen weights run everywhere")
    if len(set(tuning.targets)) < len(tuning.targets):
        yield Problem("finetune.targets", "names a layer twice", hint="name each once")


def quantized_cut(name: str, spec: ShardSpec, tp: Axis) -> Iterator[Problem]:
    """Problem of a quantized matrix that tensor parallel ranks cannot share, block by block.

    Args:
        name: Name of the layer.
        spec: Sharding of its weight.
        tp: Tensor parallel axis.
    """
    if spec.has_whole_runs(tp, BLOCK):
        return
    columns = spec.shape[1]
    if spec.dim:
        share = f"{columns} / {tp.size} = {columns / tp.size:g} weights of each row"
    else:
        rows = [segment.size * segment.replicas for segment in spec.segments]
        share = " and ".join(dict.fromkeys(f"{n} / {tp.size} = {n / tp.size:g} rows of {columns}" for n in rows))
    reason = (
        f"tp={tp.size} cuts {name} of {spec.shape} inside a block of {BLOCK} weights, which share a scale: a rank has"
    )
    hint = "use a smaller parallel.tp, or finetune.method=lora"
    yield Problem("parallel.tp", f"{reason} {share}", hint=hint)
