"""Rules on keys that another choice leaves without effect: such a key is refused, unless it has its default.

Keys about a device are no part of this, since one file serves several devices. Neither are levels and lengths that stay
in a file while an interval of 0 or another schedule on the command line leaves them out for once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from nxtrain.common.errors import Problem
from nxtrain.config.finetune_schema import ADAPTER_KEYS
from nxtrain.config.schema import RunConfig
from nxtrain.config.tables import toml_value


@dataclass(frozen=True)
class Reader:
    """Choice that reads some keys.

    Args:
        keys: Keys without effect under other choices.
        choice: Key of the choice.
        reads: True for values of the choice that read the keys.
        way_out: Text of such values.
    """

    keys: tuple[str, ...]
    choice: str
    reads: Callable[[Any], bool]
    way_out: str


def _one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: value in values


READERS = (
    Reader(
        tuple(f"finetune.{key}" for key in ADAPTER_KEYS),
        "finetune.method",
        _one_of("lora", "qlora"),
        "finetune.method=lora or qlora",
    ),
    Reader(("finetune.beta",), "finetune.objective", _one_of("dpo", "kto"), "finetune.objective=dpo or kto"),
    Reader(("finetune.label_smoothing",), "finetune.objective", _one_of("dpo"), "finetune.objective=dpo"),
    Reader(("finetune.orpo_lambda",), "finetune.objective", _one_of("orpo"), "finetune.objective=orpo"),
    Reader(
        ("finetune.desirable_weight", "finetune.undesirable_weight"),
        "finetune.objective",
        _one_of("kto"),
        "finetune.objective=kto",
    ),
    Reader(
        ("finetune.pairs_per_row",),
        "finetune.objective",
        _one_of("dpo", "orpo", "kto"),
        "finetune.objective=dpo, orpo or kto",
    ),
    Reader(("model.moe_capacity_factor",), "model.moe_dispatch", _one_of("capacity"), "model.moe_dispatch=capacity"),
    Reader(("model.moe_z_loss",), "finetune.objective", _one_of("sft"), "finetune.objective=sft"),
    Reader(("optim.decay_shape",), "optim.schedule", _one_of("wsd"), "optim.schedule=wsd"),
    Reader(
        ("parallel.cp_layout", "parallel.cp_method"), "parallel.cp", lambda cp: bool(cp > 1), "parallel.cp=2 or more"
    ),
    Reader(("backend.rounding",), "precision.update", _one_of("bf16_stochastic"), "precision.update=bf16_stochastic"),
    Reader(("data.workers", "data.worker_restarts"), "data.source", _one_of("arrow"), "data.source=arrow"),
    Reader(("data.worker_restarts",), "data.workers", bool, "data.workers=1 or more"),
    Reader(("metrics.profile_ranks",), "metrics.profile_steps", bool, "metrics.profile_steps=[FIRST, LAST]"),
)
"""Keys that depend on another key; `nxtrain.config.check` and its neighbours have those with further conditions."""


def idle_keys(config: RunConfig) -> Iterator[Problem]:
    """Problems of keys that differ from their defaults, and that nothing reads."""
    for reader in READERS:
        choice = _at(config, reader.choice)
        if reader.reads(choice):
            continue
        for key in reader.keys:
            value, default = _at(config, key), _default(config, key)
            if value == default:
                continue
            reason = f"{toml_value(value)} has no effect with {reader.choice}={toml_value(choice)}"
            yield Problem(key, reason, hint=f"use {toml_value(default)}, or {reader.way_out}")


def _at(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _default(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return type(getattr(config, section)).model_fields[name].default
