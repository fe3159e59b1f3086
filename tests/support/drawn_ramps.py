"""Ramps of the batch and of the sequence length for drawn runs, and the sizes of each step by the tokens seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from random import Random
from typing import Any

from nxtrain.config.schema import TrainConfig

END_ID = 0
"""Id that ends a document, which no drawn row holds."""

ROW_LENGTHS = (16, 18, 20, 24, 30, 36, 48)
"""Tokens of a row. After steps of four tokens, a loss of transformers in float32 is 6e-6 from that in float64."""

LAST_STEPS = 2
"""Most steps after the ramps."""


def draw_ramps(rng: Random, divides: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides for a run whose batches, or sequences, or both grow; stages end anywhere in a step.

    Args:
        divides: Number that divides the tokens of a row.
        given: Overrides of the draw.
    """
    seq_len = rng.choice([length for length in ROW_LENGTHS if length % divides == 0])
    unit = given["train.micro_batch"] * given["parallel.dp"]
    kinds = rng.choice((("batch",), ("seq",), ("batch", "seq"), ("batch", "seq")))
    if given.get("model.config.rope_scaling", {}).get("rope_type") == "dynamic":
        kinds = ("batch",)  # of short rows, transformers computes other frequencies; ours are those of train.seq_len
    values: dict[str, Any] = {"train.seq_len": seq_len, "train.global_batch": unit * rng.randint(1, 3)}
    if "batch" in kinds:
        values["train.batch_ramp"] = _batch_stages(rng, unit, seq_len)
    if "seq" in kinds:
        lengths = [length for length in range(1, seq_len) if seq_len % length == 0]
        chosen = sorted(rng.sample(lengths, rng.randint(1, 2)))
        most = 2 * values["train.global_batch"] * seq_len
        values["train.seq_ramp"] = [{"seq_len": length, "tokens": rng.randint(1, most)} for length in chosen]
        values |= {"data.doc_mask": True, "data.tokenizer": "tokenizer"}
        values["model.config.vocab_size"] = max(END_ID + 3, given["model.config.vocab_size"])
    return values


def _batch_stages(rng: Random, unit: int, seq_len: int) -> list[dict[str, int]]:
    stages = []
    for _ in range(rng.randint(1, 2)):
        batch = unit * rng.randint(1, 3)
        rows = rng.randint(1, 2 * batch)
        length = {"samples": rows}
        if rng.random() < 0.5:
            length = {"tokens": rows * seq_len - rng.randrange(seq_len)}
        stages.append({"global_batch": batch, **length})
    return stages


def num_steps(rng: Random, train: TrainConfig) -> int:
    """Steps of both ramps and a few after them."""
    ends = [end for of_ramp in _ends(train) for end in of_ramp]
    steps, seen = 0, 0
    while seen < max(ends):
        steps += 1
        seen = train.seq_len * sum(rows for rows, _ in sizes(train, steps))
    return steps + rng.randint(1, LAST_STEPS)


def sizes(train: TrainConfig, steps: int) -> list[tuple[int, int]]:
    """Rows of each step and tokens of a sequence, by the tokens that the steps before have seen."""
    of_batch, of_length = _ends(train)
    batches = [*(stage.global_batch for stage in train.batch_ramp), train.global_batch]
    lengths = [*(stage.seq_len for stage in train.seq_ramp), train.seq_len]
    results, seen = [], 0
    for _ in range(steps):
        rows = batches[_passed(of_batch, seen)]
        results.append((rows, lengths[_passed(of_length, seen)]))
        seen += rows * train.seq_len
    return results


def _ends(train: TrainConfig) -> tuple[list[int], list[int]]:
    """Tokens seen at the end of each stage, of the batch and of the sequence length."""
    of_batch = accumulate(stage.tokens or stage.samples * train.seq_len for stage in train.batch_ramp)
    of_length = accumulate(stage.tokens for stage in train.seq_ramp)
    return [*of_batch], [*of_length]


def _passed(ends: Sequence[int], seen: int) -> int:
    return sum(seen >= end for end in ends)
