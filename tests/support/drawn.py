"""Runs drawn from a seed: shapes, batches, layouts and precisions that no test names, each of them a command.

A drawn run is a list of overrides of `configs/tiny_cpu.toml`. The rules of the configuration decide which draws can
run, as they decide for a user.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nxtrain.common.errors import ConfigError
from nxtrain.common.vocab import IGNORE_INDEX, PROBABILITY_UNITS, true_targets
from nxtrain.config.check import Resolved, resolve_config
from nxtrain.config.load import load
from nxtrain.config.tables import toml_value
from nxtrain.data.teacher import mixed
from tests.support import TINY
from tests.support.drawn_schedules import END_ID, draw_ramps, draw_rule, num_steps, sizes
from tests.support.layouts import FULLY_SHARDED, ONE, Degrees
from tests.support.models import MIXTURES, SCALING_TYPES, WITH_EXPERTS, draw_experts, draw_scaling

OWN_SEED = 1
"""Seed of the lanes, whose draws hold every kind of run."""

SEED = int(os.environ.get("NXTRAIN_FUZZ_SEED", OWN_SEED))
"""Seed of the drawn tests; the variable runs them on others."""

MOST_TOKENS = 1536
"""Of a drawn global batch, as far as one row for each rank of the data axis allows; more rows repeat what few prove."""

MOST_PASSES = 20
"""Of micro-batches through blocks, in one step on all ranks; a run of more has the fewest steps of a draw."""

STEPS = (2, 4)
"""Fewest and most. The loss of the second step and the last weights show a wrong gradient, update or state."""

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families of the drawn models, in turn."""

WITH_TEACHER = ("gloo", "cp", "xla", "xla-cp", "mixtures")
WITH_Z_LOSS = ("gloo", "cp", "process", "xla", "xla-cp", "command", "command-cp", "ramps")
"""Lanes whose reference is of cross entropies alone, to which the z-loss may add."""

TRIES = 200
"""Draws until one fits together; far more than are ever needed."""


@dataclass(frozen=True)
class Drawn:
    """A run drawn from a seed."""

    lane: str
    seed: int
    index: int
    degrees: Degrees
    overrides: tuple[str, ...]
    steps: int
    mask: float

    def __str__(self) -> str:
        return f"{self.lane}:{self.index}"

    @property
    def resolved(self) -> Resolved:
        """The configuration, held to every rule."""
        return _resolved(self.overrides, self.degrees.world)

    @property
    def most_keys(self) -> int:
        """Most keys that a query sees in the layer where queries see fewest.

        Queries of one key have gradients of zero, in which a run compares rounding alone.
        """
        seq_len, window = self.resolved.config.train.seq_len, self.resolved.dimensions.window
        return seq_len if window is None else min(seq_len, window)

    @property
    def reproduce(self) -> str:
        """The line that runs this draw again; with `--command`, by `nxtrain launch`."""
        return f"python scripts/fuzz.py {self.seed} --only {self}"

    def token_rows(self) -> list[Tensor]:
        """Ids of each step's global batch, without a mask: (global_batch, seq_len + 1) int64."""
        return [rows for rows, _ in self._drawn_rows()]

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs and targets of each step's global batch: (global_batch, seq_len) int64 each.

        Under a ramp of the sequence length, a row is as many rows of inputs and targets as it has sequences. In some
        runs targets have the tokens of a teacher.
        """
        lengths = [length for _, length in sizes(self.resolved.config.train, self.steps)]
        pairs = [
            (rows[:, :-1].reshape(-1, length), targets.reshape(-1, length))
            for (rows, targets), length in zip(self._drawn_rows(), lengths, strict=True)
        ]
        rng, vocab_size = Random(f"teacher/{self.lane}/{self.seed}/{self.index}"), self.resolved.model.vocab_size
        if self.lane not in WITH_TEACHER or rng.random() < 0.7:
            return pairs
        return taught_pairs(pairs, k=min(vocab_size, rng.randint(1, 9)), vocab_size=vocab_size, weight=rng.random())

    def _drawn_rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Ids and targets of each step's global batch: (global_batch, seq_len + 1) and (global_batch, seq_len)."""
        resolved = self.resolved
        train, vocab_size = resolved.config.train, resolved.model.vocab_size
        least = 0
        if resolved.config.data.doc_mask:
            least = END_ID + 1
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.index)
        for number, _ in sizes(train, self.steps):
            rows = torch.randint(least, vocab_size, (number, train.seq_len + 1), generator=generator)
            targets = rows[:, 1:].clone()
            if self.mask:
                masked = torch.rand(targets.shape, generator=generator) < self.mask
                masked[1:] |= torch.rand(number - 1, 1, generator=generator) < self.mask
                masked[0, 0] = False  # a step without any target has no mean
                targets[masked] = IGNORE_INDEX
            yield rows, targets


@lru_cache(maxsize=1024)
def _resolved(overrides: tuple[str, ...], world: int) -> Resolved:
    return resolve_config(load(TINY, overrides), world)


@lru_cache(maxsize=1024)
def draw(
    lane: str, seed: int, index: int, degrees: Degrees = ONE, *, bf16: bool = False, xla: bool = False, family: str = ""
) -> Drawn:
    """One run of a layout; of a lane of mixtures, one with experts."""
    if lane.endswith("mixtures"):
        family = MIXTURES[index % len(MIXTURES)]
    family = family or FAMILIES[(seed + index) % len(FAMILIES)]
    for attempt in range(TRIES):
        rng = Random(f"{lane}/{seed}/{index}/{attempt}")
        overrides, steps, mask = _overrides(rng, degrees, family, bf16=bf16, xla=xla)
        if not xla:
            overrides |= _of_state(Random(f"state/{lane}/{seed}/{index}/{attempt}"), degrees, overrides)
        if lane in WITH_Z_LOSS:
            overrides |= draw_rule(Random(f"rule/{lane}/{seed}/{index}/{attempt}"))
            overrides["train.z_loss"] = Random(f"z/{lane}/{seed}/{index}/{attempt}").choice((0.0, 0.0, 1e-3, 0.1))
        if family in WITH_EXPERTS:
            overrides |= draw_experts(family, Random(f"experts/{lane}/{seed}/{index}/{attempt}"), overrides)
        if "model.config.rope_scaling" in overrides:
            overrides |= _of_scaling(Random(f"scaling/{lane}/{seed}/{index}/{attempt}"), overrides)
        ramps = Random(f"ramps/{lane}/{seed}/{index}/{attempt}")
        if lane == "ramps":
            overrides |= draw_ramps(ramps, degrees.divides, overrides)
        lines = tuple(f"{key}={toml_value(value)}" for key, value in overrides.items())
        drawn = Drawn(lane, seed, index, degrees, lines, steps, mask)
        try:
            train = drawn.resolved.config.train
        except ConfigError:
            continue
        if lane == "ramps":
            return replace(drawn, steps=num_steps(ramps, train), mask=0.0)
        return drawn
    raise AssertionError(f"{lane}:{index} of seed {seed}: none of {TRIES} draws fits {degrees}")


def one_in(number: int, draws: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which one in a number runs in `test.sh all` and the others with `--slow`."""
    return [
        draw if index % number == 0 else pytest.param(*_values(draw), marks=pytest.mark.slow)
        for index, draw in enumerate(draws)
    ]


def _values(draw: Any) -> tuple[Any, ...]:
    if isinstance(draw, tuple):
        return draw
    return (draw,)


SHORT = 3
"""Tokens of a row whose queries have next to no gradient beside rounding, which AdamW's eps must exceed."""


def _overrides(
    rng: Random, degrees: Degrees, family: str, *, bf16: bool, xla: bool
) -> tuple[dict[str, Any], int, float]:
    model = _model(rng, degrees, xla=xla)
    micro_batch, accumulation = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3, 5))
    if degrees.pp > 1:
        accumulation = rng.randint(1, 2 * degrees.pp + 1)
    seq_len = _seq_len(rng, degrees, xla=xla)
    if seq_len == 1 and model["vocab_size"] > 300:
        # Of one token the head's gradient is a matrix-vector product, whose BLAS kernel adds row after row: 1e-6 off.
        micro_batch = max(2, micro_batch)
    model.update(_of_family(family, model, seq_len))
    rows = max(1, MOST_TOKENS // (seq_len * degrees.dp))
    micro_batch = min(micro_batch, rows)
    accumulation = min(accumulation, rows // micro_batch)
    per_micro = degrees.tp * degrees.dp * model["num_hidden_layers"]
    if degrees.pp > 1 and per_micro * accumulation > MOST_PASSES:
        accumulation = min(accumulation, degrees.pp + 1)  # more micro-batches than stages repeat what one more proves
    passes = per_micro * accumulation
    values: dict[str, Any] = {
        "backend.name": "xla" if xla else "cpu",
        "data.source": "tokens",
        "data.path": "rows.npy",
        "data.shuffle": False,
        "data.validation_fraction": 0.0,
        "train.eval_every": 0,
        "model.family": family,
        **{f"model.config.{key}": value for key, value in model.items()},
        "model.fused_qkv": rng.random() < 0.5,
        "model.fused_gate_up": rng.random() < 0.5,
        "train.seq_len": seq_len,
        "train.micro_batch": micro_batch,
        "train.global_batch": micro_batch * accumulation * degrees.dp,
        "train.remat": rng.choice(("none", "selective", "full")),
        "train.loss_chunk_mib": rng.choice((1, 64)),
        "parallel.bucket_mib": rng.choice((1, 64)),
        **{f"parallel.{field.name}": getattr(degrees, field.name) for field in fields(degrees)},
        **_sharding(rng, degrees),
        **_cuts(rng, degrees, model["num_hidden_layers"]),
        **(_bf16(rng) if bf16 else {}),
        **_optim(rng),
    }
    if values["train.seq_len"] < SHORT:
        values["optim.eps"] = 1e-4
    steps, mask = rng.randint(*STEPS), rng.choice((0.0, 0.0, 0.3, 0.6))
    if degrees.world > 1 and not xla:
        values["backend.cpu_transport"] = rng.choice(("shared_memory", "shared_memory", "gloo"))
    return values, min(STEPS) if passes > MOST_PASSES else steps, mask


def _model(rng: Random, degrees: Degrees, *, xla: bool) -> dict[str, Any]:
    """A model whose query heads tp divides; all other sizes are free."""
    heads = degrees.tp * rng.choice((1, 2, 3, 4, 6))
    divisors = [n for n in range(1, heads + 1) if heads % n == 0 and (n % degrees.tp == 0 or degrees.tp % n == 0)]
    # transformers asks for a multiple. Below eight the gradient of RMSNorm cancels, and in float32 transformers itself
    # is 2e-5 from float64.
    hidden = heads * rng.randint(-(-8 // heads), (40 if xla else 80) // heads)
    chunks = degrees.pp * degrees.virtual_pp
    seen = rng.choice((8, 16, 64))
    scaling = {
        "factor": rng.choice((2.0, 8.0)),
        "low_freq_factor": 1.0,
        "high_freq_factor": rng.choice((2.0, 4.0)),
        "original_max_position_embeddings": seen,
    }
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice(divisors),
        "head_dim": 2 * rng.randint(1, 12),
        "intermediate_size": rng.randint(1, 120),
        "vocab_size": rng.choice((rng.randint(3, 40), rng.randint(40, 300), rng.randint(300, 600 if xla else 4000))),
        "num_hidden_layers": chunks + rng.choice((0, 0, 1, 2)),
        "rms_norm_eps": rng.choice((1e-6, 1e-5, 1e-3)),
        "rope_theta": rng.choice((100.0, 10_000.0, 500_000.0)),
        **({"rope_scaling": scaling} if rng.random() < 0.3 else {}),
        "tie_word_embeddings": rng.random() < 0.3,
        "max_position_embeddings": 512,
    }


def _of_family(family: str, model: dict[str, Any], seq_len: int) -> dict[str, Any]:
    """Sizes that a family has beside those of all, or has otherwise."""
    window = {"sliding_window": 1 + model["intermediate_size"] % (seq_len + 1)}  # one token to more than a sequence
    if family in ("mistral", "gpt_oss"):
        return window
    if family == "qwen2":
        return {**window, "max_window_layers": model["vocab_size"] % (model["num_hidden_layers"] + 1)}
    if family in ("qwen3", "qwen3_moe"):  # RMSNorm of few entries, as of the hidden size
        return {"head_dim": max(8, model["head_dim"])}
    return {}


def _seq_len(rng: Random, degrees: Degrees, *, xla: bool) -> int:
    """Tokens of a sequence: one, a few, or around a boundary of the blocks of attention."""
    around = [128 * blocks + offset for blocks in (1, 2) for offset in (-1, 0, 1)]
    length = rng.choice((1, 2, rng.randint(3, 40), rng.randint(3, 40), rng.choice(around)))
    length = min(length, 40) if xla else length
    return -(-length // degrees.divides) * degrees.divides


def _sharding(rng: Random, degrees: Degrees) -> dict[str, Any]:
    if degrees.shard not in FULLY_SHARDED:
        return {}
    values: dict[str, Any] = {"parallel.prefetch": rng.choice((0, 1, 2))}
    if degrees.shard == "hybrid":
        copies = degrees.dp * degrees.cp
        values["parallel.shard_size"] = rng.choice([n for n in range(1, copies + 1) if copies % n == 0])
    if values.get("parallel.shard_size", degrees.dp * degrees.cp) > 1:
        values["parallel.offload"] = rng.random() < 0.25
    return values


def _of_state(rng: Random, degrees: Degrees, given: dict[str, Any]) -> dict[str, Any]:
    """Units of sharded parameters, those gathered ahead, and kinds of state in host memory, each apart."""
    results: dict[str, Any] = {}
    if degrees.shard in FULLY_SHARDED:
        kinds = ("before", "none", "after") if given["parallel.prefetch"] else ("before", "none")
        results = {
            "parallel.forward_prefetch": rng.random() < 0.7,
            "parallel.backward_prefetch": rng.choice(kinds),
            "parallel.unit_params": rng.choice((0, 1, rng.randint(2, 60_000), rng.randint(2, 60_000))),
        }
    shares = "parallel.offload" in given  # of parameters that no other rank shares, none may go
    movable = ("params", "optimizer", "activations") if shares else ("optimizer", "activations")
    offloaded = [kind for kind in movable if rng.random() < (0.5 if kind == "params" else 0.3)]
    return {**results, "parallel.offload": offloaded}


def _of_scaling(rng: Random, given: dict[str, Any]) -> dict[str, Any]:
    """A scaling of any type, apart; that of Llama 3 stays as it is."""
    rope_type = rng.choice(SCALING_TYPES)
    if rope_type == "llama3":
        return {}
    keys = draw_scaling(rope_type, rng, given["train.seq_len"])
    return {f"model.config.{key}": value for key, value in keys.items()}


def _cuts(rng: Random, degrees: Degrees, num_layers: int) -> dict[str, Any]:
    """Pipeline cuts of every kind, or none, so that the layers are cut by cost."""
    num_cuts = degrees.pp * degrees.virtual_pp - 1
    if not num_cuts or rng.random() < 0.5:
        return {}
    return {"parallel.pipeline_cuts": sorted(rng.sample(range(1, num_layers), num_cuts))}


def _bf16(rng: Random) -> dict[str, Any]:
    accumulate, reduce = rng.choice((("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16")))
    return {
        "precision.params": "bf16",
        "precision.update": rng.choice(("fp32_master", "bf16_stochastic", "bf16_kahan")),
        "precision.accumulate": accumulate,
        "precision.reduce": reduce,
        "precision.state": "fp32",
    }


def _optim(rng: Random) -> dict[str, Any]:
    """AdamW whose steps are large beside rounding, and not so large that rounding grows."""
    lr = rng.choice((1e-3, 3e-4))
    return {
        "optim.schedule": "constant",
        "optim.lr": lr,
        "optim.min_lr": lr,
        "optim.warmup_steps": 0,
        "optim.betas": rng.choice(([0.9, 0.95], [0.8, 0.999])),
        "optim.eps": rng.choice((1e-4, 1e-5)),
        "optim.weight_decay": rng.choice((0.0, 0.1, 1.0)),
        "optim.decay_norms": rng.random() < 0.3,
        "optim.clip": rng.choice((0.0, 0.05, 1.0)),
    }


def drawn_tokens(
    rng: np.random.Generator, num_rows: int, k: int, seq_len: int, vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Different ids for each target and their probabilities in units, (n, K, S) each; some targets have none.

    The ids are drawn by Floyd's algorithm, whose cost does not grow with the vocabulary (Bentley and Floyd 1987).
    """
    ids = np.empty((num_rows, k, seq_len), np.int64)
    for index in range(k):
        last = vocab_size - k + index
        drawn = rng.integers(last + 1, size=(num_rows, seq_len))
        is_taken = (ids[:, :index] == drawn[:, None]).any(axis=1)
        ids[:, index] = np.where(is_taken, last, drawn)
    scores = np.sort(rng.normal(size=(num_rows, k, seq_len)), axis=1)[:, ::-1]
    probabilities = 0.9 * np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    units = (probabilities * PROBABILITY_UNITS).astype(np.int64)
    units[rng.random((num_rows, 1, seq_len)).repeat(k, axis=1) < 0.1] = 0
    return ids, units


def taught_pairs(
    pairs: Sequence[tuple[Tensor, Tensor]], *, k: int, vocab_size: int, weight: float, masked: float = 0.0
) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets with the tokens of a teacher, (n, 2R, S), of which a share does not count as well."""
    rng = np.random.default_rng(k)
    results = []
    for inputs, targets in pairs:
        own = np.where(rng.random(targets.shape) < masked, IGNORE_INDEX, targets.numpy())
        ids, units = drawn_tokens(rng, len(own), k, own.shape[1], vocab_size)
        results.append((inputs, torch.from_numpy(mixed(own, ids, units, weight))))
    return results


def entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of torch's cross entropies of (n, S, V) logits, to targets or to whole distributions of (n, 2R, S)."""
    own = true_targets(targets)
    if targets is own:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    ids, units = targets.movedim(1, -1).chunk(2, dim=-1)
    dense = torch.zeros_like(logits).scatter_add(-1, ids.clamp(min=0), units.to(logits.dtype) / PROBABILITY_UNITS)
    return F.cross_entropy(logits.movedim(-1, 1), dense.movedim(-1, 1), reduction="none")[own != IGNORE_INDEX].sum()


def dense_loss(pairs: Sequence[tuple[Tensor, Tensor]]) -> Callable[[torch.nn.Module, int], Tensor]:
    """Loss of a step: torch's divergence from whole distributions, and their entropy, on transformers' logits."""

    def loss(model: torch.nn.Module, step: int) -> Tensor:
        inputs, targets = pairs[step]
        log_q = model(input_ids=inputs).logits.double().log_softmax(-1)
        ids, units = targets.movedim(1, -1).chunk(2, dim=-1)
        counts = ids[..., 0] != IGNORE_INDEX
        dense = torch.zeros_like(log_q).scatter_add(-1, ids.clamp(min=0), units.double() / PROBABILITY_UNITS)
        divergence = F.kl_div(log_q, dense, reduction="none").sum(-1)
        entropy = -torch.xlogy(dense, dense).sum(-1)
        return (divergence + entropy)[counts].mean()

    return loss
