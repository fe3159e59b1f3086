"""Each key that depends on another choice is refused where that choice leaves the key without effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.common.errors import ConfigError, Problem
from nxtrain.config.check import resolve_config
from nxtrain.config.idle import READERS
from nxtrain.config.load import load, values
from nxtrain.config.schema import RunConfig
from nxtrain.config.tables import toml_value

EXPERTS = ("model.family=mixtral",)
ARROW = ("data.source=arrow", "data.path=x.arrow")
ANSWERS = (*ARROW, "data.packing=best_fit", "data.doc_mask=true")

IDLE: dict[str, tuple[str, tuple[str, ...]]] = {
    "finetune.r": ("8", ()),
    "finetune.alpha": ("16.0", ()),
    "finetune.dropout": ("0.1", ()),
    "finetune.targets": ('["q_proj"]', ()),
    "finetune.rslora": ("true", ()),
    "finetune.adapter": ("folder", ()),
    "finetune.beta": ("0.2", (*ANSWERS, "finetune.objective=orpo")),
    "finetune.label_smoothing": ("0.1", (*ANSWERS, "finetune.objective=orpo")),
    "finetune.orpo_lambda": ("0.2", ()),
    "finetune.desirable_weight": ("2.0", (*ANSWERS, "finetune.objective=orpo")),
    "finetune.undesirable_weight": ("2.0", ()),
    "finetune.pairs_per_row": ("4", ()),
    "model.moe_dispatch": ("capacity", ()),
    "model.moe_capacity_factor": ("2.0", EXPERTS),
    "model.moe_z_loss": ("0.1", (*EXPERTS, *ANSWERS, "finetune.objective=orpo")),
    "parallel.virtual_pp": ("2", ()),
    "parallel.schedule": ("zero_bubble", ()),
    "parallel.pipeline_cuts": ("[1]", ()),
    "parallel.ep": ("2", ()),
    "parallel.async_tp": ("true", ()),
    "parallel.shard_size": ("2", ("parallel.dp=2",)),
    "parallel.unit_params": ("9", ()),
    "parallel.prefetch": ("2", ()),
    "parallel.forward_prefetch": ("false", ()),
    "parallel.backward_prefetch": ("after", ()),
    "precision.loss_scale": ("4.0", ()),
    "precision.loss_scale_every": ("4", ()),
    "optim.decay_ratio": ("0.2", ()),
    "optim.decay_shape": ("sqrt", ()),
    "optim.pieces": ("[{steps = 3, lr = 1.0}]", ()),
    "optim.adam_lr": ("1e-3", ()),
    "optim.muon_scale": ("original", ()),
    "optim.muon_momentum": ("0.9", ()),
    "optim.muon_momentum_pieces": ("[{steps = 3, to = 0.9}]", ()),
    "optim.muon_nesterov": ("false", ()),
    "optim.muon_steps": ("4", ()),
    "optim.muon_precision": ("bf16", ()),
    "data.weights": ("[1.0]", ()),
    "data.teacher_k": ("4", ()),
    "data.teacher_weight": ("0.5", ()),
    "data.validation_path": ("v.arrow", ()),
}
"""Keys that depend on another choice: a value, and overrides under which nothing reads the key."""

ALWAYS = {
    "run": "name dir seed",
    "cluster": "instance nodes",
    "model": "family preset hf init config",
    "parallel": "tp pp dp cp shard offload",
    "train": "steps epochs seq_len global_batch batch_ramp seq_ramp micro_batch remat eval_every z_loss",
    "precision": "type params update state fp8",
    "optim": "lr schedule warmup_steps warmup_ratio name betas eps weight_decay clip weight_decay_schedule "
    "weight_decay_pieces beta1_pieces beta2_pieces ema_decay",
    "finetune": "method objective",
    "data": "source mixture tokenizer teacher packing doc_mask shuffle validation_fraction",
    "checkpoint": "every mirror resume",
    "backend": "name deterministic",
    "metrics": "log_every tensorboard prometheus wandb mlflow progress spike_threshold noise_scale profile_steps",
    "compile": "torch_compile",
    "recovery": "hang_timeout_s max_restarts in_job grace_s max_same_step non_finite vote_every on_divergence debug",
}
"""Keys that every run reads, or whose value says that a part of the run is there."""

STAYING = {
    "a device reads it, and one file serves several": {
        "backend": "layers attention experts rounding cpu_transport in_flight",
        "compile": "cache_dir optlevel max_recompiles manifest on_miss",
        "metrics": "step_sections profile_ranks",
    },
    "it is about the speed of reading, and another source may replace this one": {
        "data": "workers worker_restarts",
    },
    "it permits something": {
        "backend": "allow_unverified",
        "compile": "allow_network allow_fallbacks",
        "checkpoint": "allow_drift",
    },
    "it is of an interval or a factor that may be 0 for once": {
        "train": "eval_batches",
        "checkpoint": "keep keep_every async strict",
        "optim": "decay_norms",
    },
    "it is a level or a length of a course that another schedule replaces": {
        "optim": "min_lr decay_steps rewarm_steps",
    },
    "it is a source or a place that another one replaces": {
        "data": "path cache_dir",
    },
    "it is a size, a type or a form of tensors, which a layout may lack": {
        "model": "fused_qkv fused_gate_up",
        "parallel": "sequence_parallel cp_layout cp_method bucket_mib",
        "precision": "accumulate reduce",
        "train": "loss_chunk_mib",
    },
}
"""Further keys without effect in some runs, and the reasons for which these are not refused."""


def found(tmp_path: Path, *overrides: str) -> list[Problem]:
    (tmp_path / "run.toml").touch()
    try:
        resolve_config(load(tmp_path / "run.toml", overrides), 2)
    except ConfigError as error:
        return list(error.problems)
    return []


def named(table: dict[str, str]) -> set[str]:
    return {f"{section}.{name}" for section, names in table.items() for name in names.split()}


def test_every_key_has_a_condition() -> None:
    """A new key belongs to one of the tables above."""
    keys = set(values(RunConfig()))
    sets = [set(IDLE), named(ALWAYS), *(named(table) for table in STAYING.values())]
    assert set().union(*sets) == {key for key in keys if not key.startswith("model.config")} | {"model.config"}
    assert sum(map(len, sets)) == len(set().union(*sets)), "a key is in one table"


def test_the_table_has_every_key_that_a_reader_names() -> None:
    assert {key for reader in READERS for key in reader.keys} <= set(IDLE)
    assert {reader.choice for reader in READERS} <= set(values(RunConfig()))


@pytest.mark.parametrize("key", IDLE)
def test_a_key_that_nothing_reads_is_refused(tmp_path: Path, key: str) -> None:
    value, others = IDLE[key]
    assert not [problem for problem in found(tmp_path, "train.eval_every=0", *others) if problem.key == key]
    problems = found(tmp_path, "train.eval_every=0", *others, f"{key}={value}")
    assert key in {problem.key for problem in problems}
    assert all(problem.hint for problem in problems if problem.key == key)


@pytest.mark.parametrize("key", IDLE)
def test_a_default_is_accepted_under_any_choice(tmp_path: Path, key: str) -> None:
    default, others = toml_value(values(RunConfig())[key]), IDLE[key][1]
    assert found(tmp_path, *others, f"{key}={default}") == found(tmp_path, *others)


def test_a_problem_names_the_choice(tmp_path: Path) -> None:
    (problem,) = found(tmp_path, "finetune.r=8")
    assert problem.reason == '8 has no effect with finetune.method="full"'
    assert problem.hint == "use 16, or finetune.method=lora or qlora"
    assert problem.origin == "override"
