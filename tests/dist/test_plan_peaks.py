"""Predicted memory against training steps of real ranks on this CPU, which notice every kind and every key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from nxtrain.backends import cpu_products
from nxtrain.backends.c10d import C10dBackend
from nxtrain.config.check import Resolved
from nxtrain.plan.job import Job
from nxtrain.plan.memory import Bytes, stage_bytes
from nxtrain.tools.trace.fake_rank import Traced, step_memory
from nxtrain.train.build import mesh_of
from tests.support.memory import TOLERANCE, Measured, job_of, returns_pages, rise_bytes
from tests.support.models import plan
from tests.support.ranks import RankPool

SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
MASTER = {"params": "bf16", "update": "fp32_master"}
LONG = {"seq_len": 1024, "micro_batch": 1, "global_batch": 2}
"""A sequence of 1,024 tokens in float32 takes fused attention, which keeps no probabilities."""

Tables = Mapping[str, Mapping[str, Any]]

SHARDED: Tables = {
    "model": {"num_hidden_layers": 8},
    "train": {"seq_len": 16, "micro_batch": 1, "global_batch": 4},
    "precision": MASTER,
}
"""Eight blocks whose parameters take most of the memory."""

FOUR: Tables = {
    "model": {"num_hidden_layers": 4, "vocab_size": 100},
    "train": {"seq_len": 16, "micro_batch": 1, "global_batch": 8},
    "precision": MASTER,
}
"""Four blocks whose shards on four ranks are small beside what is gathered."""

EXPERTS = {"family": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}

GPT_OSS = {"family": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64}

FEW = {"seq_len": 16, "micro_batch": 1}
"""So few tokens that parameters take most of the memory."""

RUNS: dict[str, Tables] = {
    "alone": {},
    "compensation": {"precision": {"params": "bf16", "update": "bf16_kahan", "state": "bf16"}},
    "selective": {"train": {"remat": "selective"}},
    "full remat": {"train": {"remat": "full"}},
    "one block": {"model": {"num_hidden_layers": 1}},
    "few tokens": {"train": {**FEW, "global_batch": 4}, "precision": MASTER},
    "small heads and feed-forward": {
        "model": {"intermediate_size": 32, "head_dim": 4, "vocab_size": 100, "num_hidden_layers": 6},
        "train": LONG,
    },
    "wide feed-forward": {"model": {"intermediate_size": 2048, "num_hidden_layers": 2}, "train": LONG},
    "wide feed-forward, unfused": {
        "model": {"intermediate_size": 2048, "num_hidden_layers": 2, "fused_qkv": False, "fused_gate_up": False},
        "train": LONG,
    },
    "wide heads": {
        "model": {"intermediate_size": 32, "head_dim": 64, "num_key_value_heads": 2, "fused_qkv": False},
        "train": LONG,
    },
    "one K/V head": {"model": {"intermediate_size": 32, "head_dim": 64, "num_key_value_heads": 1}, "train": LONG},
    "chunks of logits": {"train": {"loss_chunk_mib": 1}, "model": {"vocab_size": 6000, "num_hidden_layers": 1}},
    "a large vocabulary": {"model": {"vocab_size": 6000, "num_hidden_layers": 1}, "precision": MASTER},
    "a large vocabulary in fp16": {
        "model": {"vocab_size": 6000, "num_hidden_layers": 1},
        "precision": {**MASTER, "params": "fp16"},
    },
    "a tied matrix": {
        "model": {"vocab_size": 6000, "num_hidden_layers": 1, "tie_word_embeddings": True},
        "train": {"seq_len": 64},
    },
    "tp": {"parallel": {"tp": 2}, "model": {"vocab_size": 1001, "intermediate_size": 353}},
    "a padded vocabulary": {
        "parallel": {"tp": 2},
        "model": {"vocab_size": 6001, "num_hidden_layers": 1},
        "precision": MASTER,
        "finetune": {"method": "lora", "r": 8},
    },
    "tp, sequence parallel": {"parallel": {"tp": 4, "sequence_parallel": True}, "precision": MASTER},
    "more tp than K/V heads": {"parallel": {"tp": 4}, "model": {"num_key_value_heads": 2}, "train": {"seq_len": 64}},
    "dp": {"parallel": {"dp": 2}, "train": {**FEW, "global_batch": 4}},
    "zero1": {"parallel": {"dp": 3, "shard": "zero1"}, "precision": MASTER, "train": {**FEW, "global_batch": 6}},
    "grad_op": {"parallel": {"dp": 2, "shard": "grad_op"}, **SHARDED},
    "full": {"parallel": {"dp": 3, "shard": "full"}, "precision": MASTER, "train": {**FEW, "global_batch": 6}},
    "full, units": {"parallel": {"dp": 2, "shard": "full", "unit_params": 250_000}, **SHARDED},
    "full, three ahead": {"parallel": {"dp": 4, "shard": "full", "prefetch": 3}, **FOUR},
    "full, none ahead": {"parallel": {"dp": 4, "shard": "full", "prefetch": 3, "backward_prefetch": "none"}, **FOUR},
    "full, a large vocabulary": {
        "parallel": {"dp": 2, "shard": "full"},
        "train": {**FEW, "global_batch": 4},
        "model": {"vocab_size": 6000, "num_hidden_layers": 2},
    },
    "hybrid": {"parallel": {"dp": 4, "shard": "hybrid", "shard_size": 2}, "train": {"seq_len": 64}},
    "ring": {"parallel": {"cp": 2}, "train": {"seq_len": 512, "micro_batch": 2}, "precision": MASTER},
    "ring of four, striped": {
        "parallel": {"cp": 4, "cp_layout": "striped"},
        "train": {"seq_len": 2048, "micro_batch": 1, "global_batch": 2},
    },
    "ring, tp and zero1": {
        "parallel": {"cp": 2, "tp": 2, "sequence_parallel": True, "shard": "zero1"},
        "train": {"seq_len": 1024, "micro_batch": 1, "global_batch": 2, "remat": "selective"},
        "precision": MASTER,
    },
    "gather": {"parallel": {"cp": 2, "cp_method": "gather"}, "train": {"seq_len": 512, "micro_batch": 2}},
    "gather, documents": {
        "parallel": {"cp": 2, "cp_method": "gather"},
        "train": {"seq_len": 1024, "micro_batch": 1, "global_batch": 2},
        "data": {"doc_mask": True},
    },
    "gather, full, full remat": {
        "parallel": {"cp": 2, "dp": 2, "cp_method": "gather", "shard": "full"},
        "train": {"seq_len": 1024, "micro_batch": 1, "global_batch": 4, "remat": "full"},
        "precision": MASTER,
    },
    "muon": {"parallel": {"tp": 2, "dp": 2}, "train": {**FEW, "global_batch": 4}, "optim": {"name": "muon"}},
    "muon, zero1": {
        "parallel": {"dp": 3, "shard": "zero1"},
        "train": {**FEW, "global_batch": 6},
        "precision": MASTER,
        "optim": {"name": "muon"},
    },
    "stages": {"parallel": {"pp": 2}, "train": {"global_batch": 12}},
    "chunks": {"parallel": {"pp": 2, "virtual_pp": 2}, "train": {"global_batch": 16}},
    "zero bubble": {"parallel": {"pp": 3, "schedule": "zero_bubble"}, "train": {"global_batch": 16}},
    "zero bubble, full remat": {
        "parallel": {"pp": 2, "schedule": "zero_bubble"},
        "train": {"global_batch": 12, "remat": "full"},
        "model": {"num_hidden_layers": 8},
    },
    "zero bubble, sequence parallel": {
        "parallel": {"pp": 2, "tp": 2, "schedule": "zero_bubble", "sequence_parallel": True},
        "train": {"global_batch": 12, "remat": "full"},
        "model": {"num_hidden_layers": 8},
    },
    "lora": {"finetune": {"method": "lora", "r": 16}, "precision": MASTER},
    "lora of some, dropout": {
        "finetune": {"method": "lora", "r": 16, "targets": ("q_proj", "down_proj"), "dropout": 0.1},
        "precision": MASTER,
    },
    "lora of last layers": {
        "finetune": {"method": "lora", "r": 16, "targets": ("down_proj",)},
        "precision": MASTER,
        "model": {"num_hidden_layers": 2},
    },
    "lora of a last layer, one block": {
        "finetune": {"method": "lora", "r": 16, "targets": ("down_proj",)},
        "precision": MASTER,
        "model": {"num_hidden_layers": 1, "vocab_size": 100},
    },
    "lora of a last layer, one block, full remat": {
        "finetune": {"method": "lora", "r": 16, "targets": ("down_proj",)},
        "precision": MASTER,
        "model": {"num_hidden_layers": 1, "vocab_size": 100, "intermediate_size": 1024},
        "train": {"remat": "full"},
    },
    "lora beside a frozen gate, chunks": {
        "finetune": {"method": "lora", "r": 16, "targets": ("up_proj",)},
        "precision": MASTER,
        "parallel": {"pp": 2, "virtual_pp": 2},
        "model": {"intermediate_size": 1024, "fused_gate_up": False},
        "train": {"global_batch": 12, "remat": "selective"},
    },
    "experts": {"model": EXPERTS},
    "experts, full remat": {"model": EXPERTS, "train": {"remat": "full"}},
    "experts, few tokens": {"model": EXPERTS, "train": {**FEW, "global_batch": 4}, "precision": MASTER},
    "wide experts": {"model": {**EXPERTS, "intermediate_size": 1024, "num_hidden_layers": 1}, "train": LONG},
    "experts, sequence parallel": {"model": EXPERTS, "parallel": {"tp": 2, "sequence_parallel": True}},
    "experts, full": {
        "model": EXPERTS,
        "parallel": {"dp": 2, "shard": "full"},
        "precision": MASTER,
        "train": {**FEW, "global_batch": 4},
    },
    "divided experts": {
        "model": EXPERTS,
        "parallel": {"dp": 2, "ep": 2},
        "precision": MASTER,
        "train": {**FEW, "global_batch": 4},
    },
    "divided experts, zero1": {
        "model": EXPERTS,
        "parallel": {"dp": 4, "ep": 2, "shard": "zero1"},
        "precision": MASTER,
        "train": {**FEW, "global_batch": 8},
    },
    "divided experts, full": {
        "model": EXPERTS,
        "parallel": {"dp": 4, "ep": 2, "shard": "full"},
        "precision": MASTER,
        "train": {**FEW, "global_batch": 8},
    },
    "divided experts, full, units": {
        "model": {**EXPERTS, "num_hidden_layers": 6},
        "parallel": {"dp": 4, "ep": 2, "shard": "full", "unit_params": 1_000_000},
        "precision": MASTER,
        "train": {**FEW, "global_batch": 8},
    },
    "divided experts, muon, zero1": {
        "model": {**EXPERTS, "num_hidden_layers": 2},
        "parallel": {"dp": 4, "ep": 2, "shard": "zero1"},
        "train": {**FEW, "global_batch": 8},
        "optim": {"name": "muon"},
    },
    "experts in half of the blocks": {
        "model": {
            "family": "qwen3_moe",
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "mlp_only_layers": [0, 2],
        }
    },
    "wide blocks without experts, stages, lora": {
        "model": {
            "family": "qwen3_moe",
            "num_experts": 8,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "intermediate_size": 1500,
            "mlp_only_layers": [1, 3],
        },
        "parallel": {"pp": 2},
        "train": {"remat": "full"},
        "finetune": {"method": "lora", "r": 4, "targets": ["q_proj", "o_proj"]},
        "precision": MASTER,
    },
    "wide blocks without experts, full": {
        "model": {
            "family": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "intermediate_size": 1500,
            "mlp_only_layers": [0],
        },
        "parallel": {"dp": 2, "shard": "full"},
        "train": {"seq_len": 64},
        "precision": MASTER,
    },
    "sinks, biases of experts": {"model": GPT_OSS},
    "sinks, wide experts": {"model": {**GPT_OSS, "intermediate_size": 1024}},
    "sinks, divided experts, zero1": {
        "model": {**GPT_OSS, "num_hidden_layers": 2},
        "parallel": {"dp": 2, "ep": 2, "shard": "zero1"},
        "train": {**FEW, "global_batch": 4},
    },
    "adapters of experts": {
        "model": EXPERTS,
        "finetune": {"method": "lora", "r": 16, "targets": ["q_proj", "experts.gate_up_proj", "experts.down_proj"]},
    },
    "qlora": {"finetune": {"method": "qlora", "r": 16}, "precision": MASTER, "train": {"seq_len": 32}},
    "qlora, tp": {
        "finetune": {"method": "qlora", "r": 8},
        "precision": MASTER,
        "parallel": {"tp": 2},
        "model": {"intermediate_size": 384},
        "train": {"seq_len": 32},
    },
}
"""Changes of a run of two micro-batches on a rank, each of four sequences of 256 tokens."""

COMBINED = (
    "small heads and feed-forward",
    "wide feed-forward",
    "wide feed-forward, unfused",
    "wide heads",
    "one K/V head",
    "a large vocabulary",
    "more tp than K/V heads",
    "full, three ahead",
    "full, a large vocabulary",
    "ring of four, striped",
    "ring, tp and zero1",
    "gather, documents",
    "gather, full, full remat",
    "muon, zero1",
    "zero bubble, full remat",
    "zero bubble, sequence parallel",
    "lora of some, dropout",
    "lora of last layers",
    "lora of a last layer, one block",
    "lora of a last layer, one block, full remat",
    "experts, full remat",
    "wide experts",
    "experts, sequence parallel",
    "experts, full",
    "divided experts, zero1",
    "divided experts, full",
    "divided experts, full, units",
    "divided experts, muon, zero1",
    "wide blocks without experts, full",
    "sinks, wide experts",
    "sinks, divided experts, zero1",
    "qlora, tp",
)
"""Runs that combine what others have one by one; measured with `--slow`."""

OTHER_VALUES: dict[tuple[str, str], Any] = {
    ("parallel", "shard"): "none",
    ("parallel", "cp"): 1,
    ("parallel", "cp_method"): "ring",
    ("parallel", "sequence_parallel"): False,
    ("parallel", "unit_params"): 0,
    ("parallel", "backward_prefetch"): "before",
    ("parallel", "schedule"): "1f1b",
    ("train", "remat"): "none",
    ("train", "loss_chunk_mib"): 512,
    ("precision", "params"): "fp32",
    ("precision", "update"): "fp32",
    ("precision", "state"): "fp32",
    ("precision", "accumulate"): "bf16",
    ("precision", "reduce"): "bf16",
    ("optim", "name"): "adamw",
    ("finetune", "method"): "full",
    ("finetune", "r"): 1,
    ("finetune", "targets"): (),
    ("model", "fused_gate_up"): True,
}
"""Keys on which the memory of a rank depends, with a value that some runs do not have."""


def resolved_of(tables: Tables) -> Resolved:
    given = {name: dict(table) for name, table in tables.items()}
    model = given.pop("model", {})
    own: dict[str, Any] = {key: model.pop(key) for key in ("family", "fused_qkv", "fused_gate_up") if key in model}
    parallel: dict[str, Any] = {"dp": 1, **given.pop("parallel", {})}
    train = {"seq_len": 256, "micro_batch": 4, "global_batch": 8 * parallel["dp"], **given.pop("train", {})}
    return plan(
        "mha",
        model=own | {"config": {**SHAPE, **model}},
        parallel=parallel,
        train=train,
        backend={"name": "cpu"},
        **given,
    )


def memory_of_rank(backend: C10dBackend, resolved: Resolved) -> Traced:
    """Memory of a step on this rank, by torch's kernels.

    On a CPU without instructions for bf16, blocks of float32 copies are as small beside these tensors as beside others.
    """
    with mock.patch.object(cpu_products, "BLOCK_ENTRIES", 1 << 12):
        return step_memory(resolved, backend, mesh_of(resolved, backend))


@pytest.fixture(scope="module")
def measured(ranks: RankPool, request: pytest.FixtureRequest) -> dict[str, Measured]:
    results = {}
    for name, tables in RUNS.items():
        if name in COMBINED and not request.config.getoption("--slow"):
            continue
        resolved = resolved_of(tables)
        parallel = resolved.config.parallel
        world = parallel.ranks_per_replica * parallel.dp
        of_ranks = ranks.run(world, memory_of_rank, resolved)
        results[name] = Measured(name, resolved, tuple(of_ranks[:: world // parallel.pp]))
    return results


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in COMBINED else ()) for name in RUNS]
)
def test_state_is_exact_and_the_peak_within_a_tenth(measured: dict[str, Measured], name: str) -> None:
    assert measured[name].errors() == []


@pytest.mark.parametrize("kind", ["params", "frozen", "grads", "optimizer", "activations", "logits", "buckets"])
@pytest.mark.parametrize("factor", [0, 2])
def test_a_kind_that_is_left_out_or_counted_twice_is_seen(
    measured: dict[str, Measured], kind: str, factor: int
) -> None:
    def wrong(job: Job, stage: int) -> Bytes:
        predicted = stage_bytes(job, stage)
        changed: dict[str, int] = {kind: factor * getattr(predicted, kind)}
        return predicted._replace(**changed)

    assert [name for name, run in measured.items() if run.errors(wrong)] != []


@pytest.mark.parametrize(("section", "key"), OTHER_VALUES)
def test_a_key_that_the_formula_does_not_read_is_seen(measured: dict[str, Measured], section: str, key: str) -> None:
    """Runs differ from the memory that is predicted for another value than theirs."""
    changed: dict[str, Any] = {key: OTHER_VALUES[section, key]}

    def wrong(job: Job, stage: int) -> Bytes:
        table = getattr(job.config, section).model_copy(update=changed)
        return stage_bytes(replace(job, config=job.config.model_copy(update={section: table})), stage)

    assert [name for name, run in measured.items() if run.errors(wrong)] != []


LARGE: Tables = {
    "model": {"hidden_size": 384, "intermediate_size": 1024, "vocab_size": 8000, "num_key_value_heads": 8},
    "train": {"seq_len": 512, "micro_batch": 4, "global_batch": 8},
}
"""A run beside whose half a gigabyte the code and the tables of libraries are small."""


def growth(backend: C10dBackend, large: Resolved, small: Resolved) -> int:
    """Most bytes by which the memory of this process grows in a run, once the small run has loaded the libraries.

    The process returns freed pages, as glibc does by default.
    """
    returns_pages()
    memory_of_rank(backend, small)
    return rise_bytes(lambda: memory_of_rank(backend, large))


def test_a_process_grows_by_the_predicted_bytes() -> None:
    large = resolved_of(LARGE)
    pool = RankPool()  # of new processes, whose heaps are empty
    try:
        (grown,) = pool.run(1, growth, large, resolved_of({}))
    finally:
        pool.close()
    predicted = stage_bytes(job_of(large), 0).total
    assert grown == pytest.approx(predicted, rel=TOLERANCE)
