"""Rules on keys that another choice leaves without effect: such a key is refused, unless it has its default.

Keys about a device, the layout of ranks, and the speed of a run are accepted. One file serves several devices, and an
override may choose a smaller layout. Levels and lengths are accepted, too. They may stay in a file while an override
chooses an interval of 0 or another schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        keys: Keys without effect under other values of the choice.
        choice: Key of the choice.
        values: Values of the choice that read the keys.
    """

    keys: tuple[str, ...]
    choice: str
    values: tuple[str, ...]


READERS = (
    Reader(tuple(f"finetune.{key}" for key in ADAPTER_KEYS), "finetune.method", ("lora", "qlora")),
    Reader(("finetune.beta",), "finetune.objective", ("dpo", "kto")),
    Reader(("finetune.label_smoothing",), "finetune.objective", ("dpo",)),
    Reader(("finetune.orpo_lambda",), "finetune.objective", ("orpo",)),
    Reader(("finetune.desirable_weight", "finetune.undesirable_weight"), "finetune.objective", ("kto",)),
    Reader(("finetune.pairs_per_row",), "finetune.objective", ("dpo", "orpo", "kto")),
    Reader(("model.moe_capacity_factor",), "model.moe_dispatch", ("capacity",)),
    Reader(("model.moe_z_loss",), "finetune.objective", ("sft",)),
    Reader(("optim.decay_shape",), "optim.schedule", ("wsd",)),
)
"""Keys that depend on another key; `nxtrain.config.check` and its neighbours have those with further conditions."""


def idle_keys(config: RunConfig) -> Iterator[Problem]:
    """Problems of keys that differ from their defaults, and that nothing reads."""
    for reader in READERS:
        choice, _ = _value_and_default(config, reader.choice)
        if choice in reader.values:
            continue
        for key in reader.keys:
            value, default = _value_and_default(config, key)
            if value == default:
                continue
            reason = f"{toml_value(value)} has no effect with {reader.choice}={toml_value(choice)}"
            hint = f"use {toml_value(default)}, or {reader.choice}={' or '.join(reader.values)}"
            yield Problem(key, reason, hint=hint)


def _value_and_default(config: RunConfig, key: str) -> tuple[Any, Any]:
    section_name, _, name = key.partition(".")
    section = getattr(config, section_name)
    return getattr(section, name), type(section).model_fields[name].default
