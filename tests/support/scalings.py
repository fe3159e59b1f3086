"""Drawn scalings of the rotary embedding, for which a sequence is long."""

from __future__ import annotations

from random import Random
from typing import Any

SCALING_TYPES = ("linear", "dynamic", "yarn", "llama3")


def draw_scaling(rope_type: str, rng: Random, seq_len: int) -> dict[str, Any]:
    """Keys `rope_scaling` and `max_position_embeddings` of a model that sees `seq_len` tokens beyond its original."""
    original = rng.randint(max(1, seq_len // 4), max(1, seq_len - 1))
    factor = seq_len / original * rng.uniform(1.01, 4.0)
    scaling: dict[str, Any] = {"rope_type": rope_type, "factor": factor}
    if rope_type in ("linear", "dynamic"):
        return {"rope_scaling": scaling, "max_position_embeddings": original}
    scaling["original_max_position_embeddings"] = original
    if rope_type == "llama3":
        low = rng.uniform(0.5, 2.0)
        scaling |= {"low_freq_factor": low, "high_freq_factor": low * rng.uniform(1.5, 8.0)}
        return {"rope_scaling": scaling, "max_position_embeddings": int(original * factor)}
    optional = {
        "attention_factor": rng.uniform(0.5, 2.0),
        "beta_fast": rng.uniform(5.0, 64.0),
        "beta_slow": rng.uniform(0.2, 4.0),
        "mscale": rng.uniform(0.3, 2.0),
        "mscale_all_dim": rng.uniform(0.3, 2.0),
        "truncate": False,
    }
    scaling |= {name: value for name, value in optional.items() if rng.random() < 0.4}
    return {"rope_scaling": scaling, "max_position_embeddings": rng.choice((original, int(original * factor)))}
