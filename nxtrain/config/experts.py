"""Rules of mixture-of-experts models: their keys, the division of experts over ranks, and excluded features."""

from __future__ import annotations

from collections.abc import Iterator

from nxtrain.common.dimensions import MoeShape
from nxtrain.common.errors import Problem
from nxtrain.common.mesh import divisors
from nxtrain.common.text import listed
from nxtrain.config.schema import FULLY_SHARDED, RunConfig


def experts(config: RunConfig, mixture: MoeShape | None) -> Iterator[Problem]:
    """Check the keys about experts, and experts combined with other features; yield the problems."""
    if mixture is None:
        for key, off in (("moe_dispatch", "dropless"), ("moe_z_loss", 0.0)):
            value = getattr(config.model, key)
            if value != off:
                reason = f"{value} is for models with experts, and this one has none"
                yield Problem(f"model.{key}", reason, hint=f"use {off}, or model.family=mixtral or qwen3_moe")
    elif config.compile.torch_compile and config.model.moe_dispatch == "dropless":
        reason = "the host reads the number of rows of each expert, which a compiled block cannot"
        yield Problem("compile.torch_compile", reason, hint="use false, or model.moe_dispatch=capacity")
    if config.compile.torch_compile and config.parallel.ep > 1 and config.parallel.shard in FULLY_SHARDED:
        reason = (
            f"with shard={config.parallel.shard} divided experts are gathered inside of a block, which is one graph"
        )
        yield Problem("compile.torch_compile", reason, hint="use false, parallel.shard=zero1, or parallel.ep=1")
    if mixture is not None and mixture.biases:
        yield from _with_biases(config)
    if config.parallel.ep > 1:
        yield from _division(config, 0 if mixture is None else mixture.num_experts)


def _with_biases(config: RunConfig) -> Iterator[Problem]:
    """Check a gpt-oss model, whose experts have biases and whose heads have attention sinks; yield the problems."""
    if config.backend.layers == "nxd":
        reason = "this model has biases that NeuronX Distributed's layers lack"
        yield Problem("backend.layers", reason, hint="use auto or native")
    if config.parallel.cp > 1:
        reason = f"cp={config.parallel.cp} divides sequences, and attention between ranks does not support sinks"
        yield Problem("parallel.cp", reason, hint="use parallel.cp=1, and tp, ep or pp in its place")
    targets = [target for target in config.finetune.targets if target.startswith("experts.")]
    if targets:
        reason = f"{targets[0]}: files of this model interleave gate and up rows, for which adapters cannot be saved"
        yield Problem("finetune.targets", reason, hint="adapt the layers of attention")


def _division(config: RunConfig, num_experts: int) -> Iterator[Problem]:
    """Check the division of a model's experts over ranks, and yield the problems.

    `Mesh.build` checks the ranks themselves.
    """
    ep = config.parallel.ep
    if not num_experts:
        reason = f"{ep} ranks divide the experts, but the model has none"
        yield Problem("parallel.ep", reason, hint="use parallel.ep=1, or a family with experts")
    elif num_experts % ep:
        reason = f"{ep} does not divide the model's {num_experts} experts"
        yield Problem("parallel.ep", reason, hint=f"use one of {listed(divisors(num_experts))}")
    if config.backend.layers == "nxd":
        reason = f"ep={ep} divides nxtrain's own experts, which backend.layers=nxd replaces"
        yield Problem("backend.layers", reason, hint="use auto or native")
