"""Number types of a run: presets with the names of NxD Training, and rules between the keys of [precision]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nxtrain.common.errors import Problem
from nxtrain.config.schema import FULLY_SHARDED, RunConfig
from nxtrain.config.tables import toml_value

_KEYS = ("params", "accumulate", "reduce", "update", "state")
_MIXED = ("bf16", "fp32", "fp32", "fp32_master", "fp32")

PRESETS: dict[str, Mapping[str, str]] = {
    name: dict(zip(_KEYS, values, strict=True))
    for name, values in {
        "fp32": ("fp32", "fp32", "fp32", "fp32", "fp32"),
        "bf16SR": ("bf16", "bf16", "bf16", "bf16_stochastic", "bf16"),
        "mixed_precision": _MIXED,
        "autocast": _MIXED,
    }.items()
}
"""Values of the keys of [precision] for each preset `precision.type`.

Source: NxD Training 1.7, configuration overview and `examples/training_orchestrator.py`. In NxD Training, `autocast`
has the master weights and sums of `mixed_precision`, with an fp32 residual stream. Here the residual stream has the
type of the parameters.
"""

MAX_ROUNDED_BETA = 0.99
"""Largest beta of a moving average that is stored in bf16 and rounded to nearest.

With this beta, a step moves the average by 1% of the distance to the gradient. Adjacent bf16 numbers are 0.4 to 0.8%
apart, so that a slower average would not change.
"""

_UPDATES = {
    "fp32": ("fp32",),
    "bf16": ("fp32_master", "bf16_stochastic", "bf16_kahan"),
    "fp16": ("fp32_master",),
}
_UPDATE_REASONS = {
    "fp32": "fp32 parameters are exact enough to be updated in place",
    "fp16": "an fp16 parameter loses most updates, and the smallest are zero",
    "bf16": "a bf16 parameter has 8 significant bits and loses most updates unless the rule keeps the rest",
}


def expand(table: dict[str, Any], origins: dict[str, str]) -> tuple[dict[str, Any], dict[str, str], list[Problem]]:
    """Fill in the values of the precision preset that a configuration names.

    Args:
        table: Table of the whole configuration.
        origins: Origin of each value by dotted key.

    Returns:
        The table and the origins with the preset's values, and a problem for each value that contradicts the preset.
    """
    given = table.get("precision")
    name = given.get("type") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(name, str):
        return table, origins, []
    origin = origins.get("precision.type", "")
    if name == "mixed_precisionSR":
        reason = (
            "mixed_precisionSR rounds every cast at random, but its master weights already keep what rounding loses"
        )
        hint = "use mixed_precision, or bf16SR, which has no master weights and needs stochastic rounding"
        return table, origins, [Problem("precision.type", reason, origin, hint)]
    preset = PRESETS.get(name, {})
    problems = [
        Problem(
            f"precision.{key}",
            f"{toml_value(given[key])}, but precision.type={name} means {value}",
            origins.get(f"precision.{key}", ""),
            "leave one of them out, or use precision.type=manual",
        )
        for key, value in preset.items()
        if given.get(key, value) != value
    ]
    added = {f"precision.{key}": f"precision.type={name}, {origin}" for key in preset if key not in given}
    return {**table, "precision": {**preset, **given}}, {**origins, **added}, problems


def precision(config: RunConfig) -> Iterator[Problem]:
    """Check the rules between the number types of a run, and yield the problems."""
    types, shard = config.precision, config.parallel.shard
    params, update = types.params, types.update
    if update not in _UPDATES[params]:
        reason = f"{update} does not fit params={params}: {_UPDATE_REASONS[params]}"
        yield Problem("precision.update", reason, hint=f"use {' or '.join(_UPDATES[params])}")
    decays = {f"optim.betas[{index}]": beta for index, beta in enumerate(config.optim.betas)}
    if config.optim.name == "muon":
        decays["optim.muon_momentum"] = config.optim.muon_momentum
    for name in ("beta1_pieces", "beta2_pieces", "muon_momentum_pieces"):
        for index, piece in enumerate(getattr(config.optim, name)):
            decays[f"optim.{name}[{index}].to"] = piece.to
    for key, beta in decays.items():
        if types.state == "bf16" and update != "bf16_stochastic" and beta > MAX_ROUNDED_BETA:
            reason = (
                f"bf16 rounds to nearest under update={update}: with {key}={beta} each step changes the "
                "moving average by less than half the distance to the next bf16 number, so it never changes"
            )
            hint = f"use precision.state=fp32, update=bf16_stochastic, or {key}={MAX_ROUNDED_BETA} or less"
            yield Problem("precision.state", reason, hint=hint)
    if config.backend.rounding == "hardware" and config.backend.name not in ("auto", "neuron", "neuron-native"):
        reason = f"hardware stochastic rounding exists on Trainium only, not on {config.backend.name}"
        yield Problem("backend.rounding", reason, hint="use backend.rounding=auto or software")
    yield from _fp16(config)
    if params == "fp32" and types.accumulate == "bf16":
        reason = "bf16 sums would round the fp32 gradients of fp32 params once per micro-batch"
        yield Problem("precision.accumulate", reason, hint="use precision.accumulate=fp32")
    # Reduced gradients are summed in the type of the stored parameters; before that, across nodes, in the reduce type.
    one_type = shard == "hybrid" or (shard in FULLY_SHARDED and params != "fp32")
    if one_type and types.accumulate != types.reduce:
        reason = (
            f"{types.accumulate}, but reduce={types.reduce}: parallel.shard={shard} reduces every micro-batch "
            "and sums what is reduced, so both have one type"
        )
        wide = "precision.reduce=fp32" if params == "fp32" else f"precision.accumulate={types.reduce}"
        yield Problem("precision.accumulate", reason, hint=f"use {wide}")


def _fp16(config: RunConfig) -> Iterator[Problem]:
    types, backend = config.precision, config.backend
    if types.params != "fp16":
        for key in ("loss_scale", "loss_scale_every"):
            if getattr(types, key) != getattr(type(types)(), key):
                reason = f"scales the loss of fp16 parameters, but params={types.params}"
                yield Problem(f"precision.{key}", reason, hint="leave it out, or use precision.params=fp16")
        return
    for key in ("accumulate", "reduce", "state"):
        if getattr(types, key) != "fp32":
            reason = "bf16 would round values that fp16 stores with 3 more bits"
            yield Problem(f"precision.{key}", reason, hint=f"use precision.{key}=fp32")
    if backend.name not in ("auto", "cpu", "cuda"):
        reason = f"fp16 runs on the backends cpu and cuda, not on {backend.name}"
        yield Problem("precision.params", reason, hint="use bf16, which needs no scale of the loss")
    if backend.layers == "nxd":
        reason = "nxd computes its own loss, without a scale"
        yield Problem("precision.params", reason, hint="use bf16, or backend.layers=native")
