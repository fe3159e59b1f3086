"""Rules of models with experts: their keys, the division of the experts, and the features that they exclude."""

from __future__ import annotations

from collections.abc import Iterator

from nxtrain.common.dimensions import MoeShape
from nxtrain.common.errors import Problem
from nxtrain.common.mesh import divisors
from nxtrain.common.text import listed
from nxtrain.config.schema import FULLY_SHARDED, RunConfig


def experts(config: RunConfig, mixture: MoeShape | None) -> Iterator[Problem]:
    """Problems of keys about experts, and of experts with other features."""
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
    """Problems of gpt-oss, whose experts have biases and whose heads have sinks."""
    if config.backend.layers == "nxd":
        reason = "this model has biases that NeuronX Distributed's layers lack"
        yield Problem("backend.layers", reason, hint="use auto or native")
    if config.parallel.cp > 1:
        reason = f"cp={config.parallel.cp} divides sequences, whose attention has no sinks between ranks"
        yield Problem("parallel.cp", reason, hint="use parallel.cp=1, and tp, ep or pp in its place")
    targets = [target for target in config.finetune.targets if target.startswith("experts.")]
    if targets:
        reason = f"{targets[0]}: files of this model have gate and values by turns, whose adapters are not written"
        yield Problem("finetune.targets", reason, hint="adapt the layers of attention")


def _division(config: RunConfig, num_experts: int) -> Iterator[Problem]:
    """Problems of the division of a model's experts over ranks; `Mesh.build` has those of the ranks themselves."""
    ep = config.parallel.ep
    if not num_experts:
        reason = f"{ep} ranks are to divide experts, and the model has none"
        yield Problem("parallel.ep", reason, hint="use parallel.ep=1, or a family with experts")
    elif num_experts % ep:
        reason = f"{ep} does not divide the model's {num_experts} experts"
        yield Problem("parallel.ep", reason, hint=f"use one of {listed(divisors(num_experts))}")
    if config.backend.layers == "nxd":
        reason = f"ep={ep} divides experts of our own, and backend.layers=nxd has other layers"
        yield Problem("backend.layers", reason, hint="use auto or native")
