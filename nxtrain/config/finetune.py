"""Rules of fine-tuning: methods, objectives, backends of quantized weights, and sharding of quantized matrices."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nxtrain.common.errors import Problem
from nxtrain.common.mesh import Axis
from nxtrain.common.sharding import ShardSpec
from nxtrain.config.schema import QUANTIZING, RunConfig

BLOCK = 64
"""Number of adjacent weights of an NF4 matrix that share a scale."""


def finetune(config: RunConfig, *, has_weights: bool = True) -> Iterator[Problem]:
    """Check the section [finetune] against the other keys, and yield the problems.

    Args:
        config: All values.
        has_weights: Initial weights must be named if the method needs them.
    """
    tuning, model = config.finetune, config.model
    yield from _teacher(config)
    if tuning.compares:
        yield from _preferences(config, has_weights=has_weights)
    if tuning.method == "full":
        if tuning.adapter:
            reason = f"{tuning.adapter} is an adapter, and finetune.method=full trains none"
            yield Problem("finetune.adapter", reason, hint="use finetune.method=lora or qlora, or leave it out")
        return
    if has_weights and model.init != "hf":
        reason = f"{tuning.method} trains adapters on given weights, but model.init={model.init}"
        yield Problem("finetune.method", reason, hint="set model.hf=FOLDER and model.init=hf")
    if config.backend.layers == "nxd":
        reason = "adapters are added to nxtrain's own layers, which backend.layers=nxd replaces"
        yield Problem("finetune.method", reason, hint="use backend.layers=native")
    if tuning.method == "qlora" and (config.backend.name not in QUANTIZING or config.compile.torch_compile):
        by = "compile.torch_compile" if config.compile.torch_compile else f"backend.name={config.backend.name}"
        reason = f"bitsandbytes dequantizes NF4 in eager mode on cuda and cpu, not with {by}"
        yield Problem("finetune.method", reason, hint="use lora, whose frozen weights run everywhere")
    experts = [target for target in tuning.targets if target.startswith("experts.")]
    if experts and tuning.dropout:
        reason = f"{experts[0]} has an adapter in PEFT's format for experts, which has no dropout"
        yield Problem("finetune.dropout", reason, hint="use 0, or adapt other layers than experts")
    if len(set(tuning.targets)) < len(tuning.targets):
        yield Problem("finetune.targets", "names a layer twice", hint="name each once")


def _teacher(config: RunConfig) -> Iterator[Problem]:
    """Check distillation from a teacher's tokens (data.teacher), and yield the problems."""
    data, key = config.data, "data.teacher"
    if not data.teacher:
        if data.teacher_k:
            reason = f"{data.teacher_k} tokens of a teacher, but data.teacher is empty"
            yield Problem("data.teacher_k", reason, hint="set data.teacher, or leave data.teacher_k out")
        if data.teacher_weight != type(data).model_fields["teacher_weight"].default:
            reason = f"{data.teacher_weight} of the loss for a teacher, but data.teacher is empty"
            yield Problem("data.teacher_weight", reason, hint="set data.teacher, or leave data.teacher_weight out")
        return
    if not data.teacher_k:
        yield Problem("data.teacher_k", "0, but data.teacher needs tokens", hint="set the --k of the file")
    if data.source != "tokens" or data.mixture:
        reason = "needs one file of data.source=tokens, with equally many rows, but "
        reason += "data.mixture has several" if data.mixture else f"data.source={data.source}"
        yield Problem(key, reason, hint="set data.source=tokens and data.path")
    if config.finetune.compares:
        reason = f"needs token targets, but finetune.objective={config.finetune.objective} compares whole answers"
        yield Problem(key, reason, hint="use finetune.objective=sft")
    if config.backend.layers == "nxd":
        reason = "needs a loss on several tokens for each target, which the head of backend.layers=nxd does not have"
        yield Problem(key, reason, hint="use backend.layers=native")


def _preferences(config: RunConfig, *, has_weights: bool) -> Iterator[Problem]:
    """Check a preference objective (dpo, orpo or kto), and yield the problems.

    Args:
        config: All values.
        has_weights: Initial weights must be named if the objective needs them.
    """
    tuning = config.finetune
    data = config.data
    key = "finetune.objective"
    name = tuning.objective
    if data.source != "arrow" or data.mixture:
        what, option = "compares the pairs", "--pairs"
        if name == "kto":
            what, option = "takes the labelled answers", "--labels"
        reason = f"{name} {what} of one prepared corpus, but "
        reason += "data.mixture has several" if data.mixture else f"data.source={data.source}"
        yield Problem(key, reason, hint=f"set data.source=arrow and data.path, from nxtrain data prepare {option}")
    if data.packing != "best_fit" or not data.doc_mask:
        reason = f"{name} needs whole answers that do not attend to each other in a row"
        yield Problem(key, reason, hint="set data.packing=best_fit and data.doc_mask=true")
    if name in {"dpo", "kto"} and has_weights and config.model.init != "hf":
        reason = f"{name} compares with the weights from which the run begins, but model.init={config.model.init}"
        yield Problem(key, reason, hint="set model.hf=FOLDER and model.init=hf")
    if config.train.z_loss:
        reason = f"{name} has no cross entropy of tokens to which train.z_loss={config.train.z_loss} adds"
        yield Problem(key, reason, hint="leave train.z_loss out")
    if config.precision.params == "fp16":
        reason = f"{name} weights tokens by whole answers, which the loss scale of params=fp16 does not support"
        yield Problem("precision.params", reason, hint="use bf16 or fp32")
    if config.backend.layers == "nxd":
        reason = f"{name} needs the loss of each token, which the head of backend.layers=nxd does not return"
        yield Problem(key, reason, hint="use backend.layers=native")


def quantized_cut(name: str, spec: ShardSpec, tp: Axis) -> Iterator[Problem]:
    """Check that a matrix and its tensor parallel parts are whole quantization blocks; yield the problem if not.

    Args:
        name: Name of the layer.
        spec: Shard spec of the layer's weight.
        tp: Tensor parallel axis.
    """
    if spec.has_whole_runs(tp, BLOCK):
        return
    for segment in spec.segments:
        num_weights = math.prod(spec.global_shape(segment))
        if num_weights % BLOCK:
            matrix = segment.name or name
            reason = f"qlora quantizes blocks of {BLOCK} weights, and {matrix} of {spec.global_shape(segment)} has "
            reason += f"{num_weights:,} weights, which {BLOCK} does not divide"
            yield Problem("finetune.method", reason, hint="use finetune.method=lora")
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
