"""A small run that nxtrain and NeuronX Distributed both take, and the recorded course of the latter.

Everything that the run starts from is made here, without NeuronX Distributed: weights by nxtrain's own draw, tokens by
numpy's PCG64. `nxd_oracle` takes the same start through NeuronX Distributed, `nxd_stages` writes what came out to
`tests/golden/nxd_llama.json`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nxtrain.common.family import find_family
from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved
from nxtrain.config.schema import RunConfig
from nxtrain.nn.init import draw_shard
from tests.support.nxd_cpu import COMMITS, REPOSITORY
from tests.support.parity import table_of, whole
from tests.support.runs import QUIET, records

FILE = Path(__file__).parents[1] / "golden" / "nxd_llama.json"

VERSION = "0.18.0"
SOURCE = {
    "repository": REPOSITORY,
    "commit": COMMITS[VERSION],
    "version": VERSION,
    "model": "examples/training/llama/modeling_llama_nxd.py",
}
"""Recorded sources."""

MODEL: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "initializer_range": 0.05,
}
"""Sizes are not powers of two, but divide by two ranks, as NeuronX Distributed asks."""

STEPS = 20
SEQ_LEN = 30
GLOBAL_BATCH = 4
WEIGHTS_SEED = 7
TOKENS_SEED = 2026
OPTIM: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}
"""AdamW at a constant rate; norm weights do not decay."""

RECIPE: dict[str, Any] = {
    "model": MODEL,
    "weights": {"method": "nxtrain.nn.init.draw", "seed": WEIGHTS_SEED},
    "tokens": {
        "method": "Generator(PCG64(seed)).integers(0, vocab_size, (2, rows, seq_len + 1)).min(axis=0)",
        "seed": TOKENS_SEED,
        "rows": STEPS * GLOBAL_BATCH,
        "seq_len": SEQ_LEN,
    },
    "train": {"steps": STEPS, "global_batch": GLOBAL_BATCH},
    "optim": {**OPTIM, "betas": list(OPTIM["betas"]), "decay_norms": False},
}
"""Settings that all courses share, as in the file."""


@dataclass(frozen=True)
class Case:
    """Case of NeuronX Distributed: the settings of its run."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    virtual_pp: int = 1
    stages: Literal["traced", "manual"] = "traced"
    tied: bool = False
    sequence_parallel: bool = False
    accumulation: int = 1
    zero1: bool = False
    params: Literal["fp32", "bf16"] = "fp32"
    clip: float = 1.0
    qkv: Literal["separate", "grouped", "grouped_fused"] = "separate"
    kv_size_multiplier: int = 1
    defect: str = ""
    right: str = ""

    @property
    def world(self) -> int:
        """Ranks."""
        return self.tp * self.pp * self.dp

    @property
    def alone(self) -> Case:
        """The same mathematics on one rank."""
        return Case(params=self.params, clip=self.clip, tied=self.tied)

    @property
    def micro_batch(self) -> int:
        """Sequences per rank in one forward pass."""
        return GLOBAL_BATCH // self.dp // self.accumulation


CASES: dict[str, Case] = {
    "tp1": Case(),
    "tp2": Case(tp=2),
    "tp2_sp": Case(tp=2, sequence_parallel=True),
    "tp2_sp_grouped_qkv": Case(tp=2, sequence_parallel=True, qkv="grouped"),
    "dp2": Case(dp=2),
    "dp2_clip": Case(dp=2, clip=0.25),
    "dp2_accumulate2": Case(dp=2, accumulation=2),
    "dp2_zero1": Case(dp=2, zero1=True),
    "tp2_dp2_sp_zero1": Case(tp=2, dp=2, sequence_parallel=True, zero1=True),
    "bf16_tp2_sp_zero1": Case(tp=2, sequence_parallel=True, zero1=True, params="bf16"),
    "bf16_dp2_zero1": Case(dp=2, zero1=True, params="bf16"),
    "bf16_tp2_zero1": Case(
        tp=2,
        zero1=True,
        params="bf16",
        defect="4.1: without sequence parallelism the gradient of a bf16 column layer's input is not summed over tp",
        right="bf16_tp2_sp_zero1",
    ),
    "tp2_sp_fused_qkv": Case(
        tp=2,
        sequence_parallel=True,
        qkv="grouped_fused",
        defect="4.2: the fused QKV matrix is taken for replicated, so the norm counts 1/tp of its square",
        right="tp2_sp",
    ),
    "tp2_kv_copies": Case(
        tp=2,
        qkv="grouped",
        kv_size_multiplier=2,
        defect="4.3: the norm counts K/V heads once per copy",
        right="tp2",
    ),
    "dp2_zero1_clip": Case(
        dp=2,
        zero1=True,
        clip=0.25,
        defect="4.13: ZeRO-1 is not told max_grad_norm and clips at 1.0",
        right="dp2_clip",
    ),
    "pp2": Case(pp=2),
    "pp2_micro2": Case(pp=2, accumulation=2),
    "pp2_micro4": Case(pp=2, accumulation=4),
    "pp2_manual_micro4": Case(pp=2, stages="manual", accumulation=4),
    "pp2_interleaved_micro2": Case(pp=2, virtual_pp=2, accumulation=2),
    "pp2_interleaved_micro4": Case(pp=2, virtual_pp=2, accumulation=4),
    "pp2_tied_micro2": Case(pp=2, tied=True, accumulation=2, clip=1.3),
    "pp2_tied_interleaved_micro4": Case(pp=2, virtual_pp=2, tied=True, accumulation=4),
    "pp2_dp2_micro2": Case(pp=2, dp=2, accumulation=2),
    "pp2_dp2_tied_zero1_micro2": Case(pp=2, dp=2, tied=True, zero1=True, accumulation=2),
    "tp2_pp2_micro2": Case(tp=2, pp=2, accumulation=2),
    "tp2_pp2_sp_manual_micro4": Case(tp=2, pp=2, stages="manual", sequence_parallel=True, accumulation=4),
    "tp2_pp2_sp_tied": Case(tp=2, pp=2, tied=True, sequence_parallel=True),
    "tp2_pp2_sp_interleaved_micro2": Case(tp=2, pp=2, virtual_pp=2, sequence_parallel=True, accumulation=2),
    "pp4_micro2": Case(pp=4, accumulation=2),
    "pp4_micro4": Case(pp=4, accumulation=4),
    "pp2_tied_manual_micro2": Case(
        pp=2,
        stages="manual",
        tied=True,
        accumulation=2,
        clip=1.3,
        defect="4.14: the manual partition's norm counts a tied matrix once per stage that has it",
        right="pp2_tied_micro2",
    ),
}
"""By name; bf16 through ZeRO-1 because only that keeps float32 copies of the weights."""


@dataclass(frozen=True)
class Course:
    """Losses and norms of a run."""

    losses: list[float]
    grad_norms: list[float]


@dataclass(frozen=True)
class Distance:
    """Distance of two courses, relative to the second."""

    loss: float
    norm: float

    @staticmethod
    def between(a: Course, b: Course) -> Distance:
        """Compare two courses step by step."""
        return Distance(_distance(a.losses, b.losses), _distance(a.grad_norms, b.grad_norms))

    def within(self, bound: Distance) -> bool:
        """True if neither exceeds a bound."""
        return self.loss <= bound.loss and self.norm <= bound.norm


FP32_BOUND = Distance(loss=5e-7, norm=5e-6)
"""Between exact courses in float32: four and forty roundings. Measured between all of them: 2e-7 and 1.7e-6."""


def bound(case: Case, nxd: Mapping[str, Course]) -> Distance:
    """Largest distance of a correct course from an exact one of NeuronX Distributed.

    In bfloat16 two runs round in different places, and are at most twice as far from each other as from float32. How
    far that is, NeuronX Distributed's own courses tell.
    """
    if case.params == "fp32":
        return FP32_BOUND
    courses = [nxd[name] for name, other in CASES.items() if other.params == "bf16" and not other.defect]
    result = [Distance.between(course, nxd["tp1"]) for course in courses]
    return Distance(2 * max(one.loss for one in result), 2 * max(one.norm for one in result))


def _distance(a: Iterable[float], b: Iterable[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def our_plan(case: Case, folder: Path, tokens_file: Path, tp: int = 0) -> Resolved:
    """nxtrain's configuration for a case of NeuronX Distributed, at the case's tp unless another is given."""
    family = find_family("llama")
    sizes = {**MODEL, "tie_word_embeddings": case.tied}
    model = family.config_type.model_validate(sizes)
    tables = {
        "run": {"dir": folder, "seed": WEIGHTS_SEED},
        "model": {"init": "normal", "config": sizes},
        "parallel": {
            "tp": tp or case.tp,
            "pp": case.pp,
            "virtual_pp": case.virtual_pp,
            "dp": case.dp,
            "sequence_parallel": case.sequence_parallel,
            "shard": "zero1" if case.zero1 else "none",
        },
        "train": {
            "steps": STEPS,
            "seq_len": SEQ_LEN,
            "global_batch": GLOBAL_BATCH,
            "micro_batch": case.micro_batch,
        },
        "precision": {"params": case.params, "update": "fp32" if case.params == "fp32" else "fp32_master"},
        "optim": {**OPTIM, "schedule": "constant", "clip": case.clip},
        "data": {"source": "tokens", "path": str(tokens_file), "shuffle": False},
        "checkpoint": {"every": 0},
        "metrics": QUIET,
    }
    return Resolved(RunConfig.model_validate(tables), family, model)


def token_rows() -> npt.NDArray[np.uint16]:
    """(steps * global_batch, seq_len + 1) ids, small ones more often, so that there is something to learn."""
    bits = np.random.Generator(np.random.PCG64(TOKENS_SEED))
    pairs = bits.integers(0, MODEL["vocab_size"], (2, STEPS * GLOBAL_BATCH, SEQ_LEN + 1))
    rows: npt.NDArray[np.uint16] = pairs.min(axis=0).astype(np.uint16)
    return rows


def token_file(folder: Path) -> Path:
    """Write `token_rows` as `data.source=tokens` reads them."""
    path = folder / "tokens.npy"
    np.save(path, token_rows())
    return path


@cache
def weights() -> dict[str, Tensor]:
    """Whole weights in float32, by Hugging Face's names."""
    alone, mesh = our_plan(Case(), Path(), Path()), Mesh.build(1, 0)
    shards = {}
    for name, spec in table_of(alone, mesh).items():
        shards[name] = torch.zeros(spec.local_shape(mesh.tp))
        draw_shard(shards[name], name, spec, mesh.tp, WEIGHTS_SEED)
    return whole([shards], alone)


def fingerprints() -> dict[str, str]:
    """Hashes of what the runs start from."""
    parts = [(name, x.numpy().astype("<f4").tobytes()) for name, x in sorted(weights().items())]
    return {"weights": _hash(parts), "tokens": _hash([("tokens", token_rows().astype("<u2").tobytes())])}


def _hash(parts: Iterable[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, data in parts:
        digest.update(f"{name}:{len(data)};".encode())
        digest.update(data)
    return digest.hexdigest()


def our_course(folder: Path, steps: int = STEPS) -> Course:
    """Course of an nxtrain run of so many steps, read from its metrics file."""
    lines = records(folder)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    return Course([line["loss"] for line in lines], [line["grad_norm"] for line in lines])


def content(courses: Mapping[str, Course], packages: Mapping[str, str]) -> dict[str, Any]:
    """Content of the file."""
    cases = {}
    for name, case in CASES.items():
        how = asdict(case)
        verdict = {"exact": not case.defect, "defect": how.pop("defect") or None, "right": how.pop("right") or None}
        cases[name] = {"how": how, **verdict, **asdict(courses[name])}
    return {
        "source": SOURCE,
        "packages": dict(packages),
        "recipe": RECIPE,
        "sha256": fingerprints(),
        "cases": cases,
    }


@cache
def recorded() -> dict[str, Course]:
    """The recorded courses, by the name of their case."""
    result = json.loads(FILE.read_text(encoding="utf-8"))
    again = "; record the courses again (tests/golden/README.md says how)"
    assert result["sha256"] == fingerprints(), "the golden recipe now makes other weights or tokens" + again
    courses = {name: Course(case["losses"], case["grad_norms"]) for name, case in result["cases"].items()}
    assert courses.keys() == CASES.keys(), "other cases than those recorded" + again
    assert result == content(courses, result["packages"]), "the recipe or the cases have changed" + again
    return courses
