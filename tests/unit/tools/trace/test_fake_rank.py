"""Predicted memory against one rank on fake tensors: drawn layouts, a large world, and what a trace refuses."""

from __future__ import annotations

import gc
from dataclasses import replace
from random import Random
from typing import get_args

import pytest
import torch

from nxtrain.common.errors import ConfigError
from nxtrain.common.machines import MACHINES
from nxtrain.config.check import Resolved
from nxtrain.config.finetune_schema import FinetuneConfig
from nxtrain.plan import memory
from nxtrain.plan.command import Question, predict
from nxtrain.plan.job import Attention, Job
from nxtrain.plan.predict import Assumptions
from nxtrain.tools.trace.fake_rank import LiveBytes, trace_job, trace_rank
from tests.support.drawn import one_in
from tests.support.models import changed, plan
from tests.support.published import CONFIGS
from tests.unit.plan.test_command import SEVEN, answer

DRAWN, ADAPTED, DOCUMENTS = 12, 10, 5
FIRST_BLOCK = (2, 5, 7, 13, 15, 18, 21, 30, 36)
"""Draws of ranks with the model's first block, whose adapters stand in every place."""

TOLERANCE = 0.1
RANKS_PER_NODE = 8


def draw(seed: int, *, adapted: bool = False) -> tuple[Resolved, Job, int, Attention]:
    """A layout, its job, a stage, and an attention, with two micro-batches or more; beside adapters two blocks each."""
    rng = Random(seed)
    tp, pp, dp = rng.choice([1, 2, 4]), rng.choice([1, 2, 3]), rng.choice([1, 2, 4])
    virtual_pp = rng.choice([1, 2]) if pp > 1 else 1
    params = rng.choice(["fp32", "bf16", "bf16", "fp16"])
    shard = rng.choice(["none", "zero1", "grad_op", "full", "hybrid"]) if dp > 1 else "none"
    remat = rng.choice(["none", "selective", "full"])
    split = pp > 1 and virtual_pp == 1 and shard in ("none", "zero1") and rng.random() < 0.4
    shape = {
        "vocab_size": rng.randrange(500, 4000),
        "hidden_size": 64 * rng.randrange(2, 6),
        "intermediate_size": rng.randrange(300, 1200),
        "num_hidden_layers": rng.randrange(1 + adapted, 5) * pp * virtual_pp,
        "num_attention_heads": 8,
        "num_key_value_heads": rng.choice([2, 4, 8]),
        "tie_word_embeddings": rng.random() < 0.3,
        "max_position_embeddings": 8192,
    }
    micro_batch = rng.choice([1, 2, 4])
    most = (
        6 if pp > 1 else 2
    )  # without stages, later micro-batches repeat the second, and a trace takes seconds for each
    resolved = plan(
        "mha",
        model={"config": shape, "fused_qkv": rng.random() < 0.6, "fused_gate_up": rng.random() < 0.6},
        parallel={
            "tp": tp,
            "pp": pp,
            "dp": dp,
            "virtual_pp": virtual_pp,
            "shard": shard,
            "shard_size": 2 if shard == "hybrid" else 0,
            "bucket_mib": rng.choice([1, 4, 64]),
            "sequence_parallel": tp > 1 and rng.random() < 0.7,
            "schedule": "zero_bubble" if split else "1f1b",
            "prefetch": rng.choice([1, 2]),
        },
        precision={
            "params": params,
            "update": {"fp32": "fp32", "fp16": "fp32_master"}.get(params) or rng.choice(["fp32_master", "bf16_kahan"]),
            "accumulate": rng.choice(["fp32", "bf16"]) if params == "bf16" else "fp32",
        },
        train={
            "seq_len": rng.choice([256, 512]),
            "micro_batch": micro_batch,
            "global_batch": dp * micro_batch * min(rng.choice([2, 3, 4, 6]), most),
            "remat": remat,
            "loss_chunk_mib": rng.choice([1, 64]),
        },
    )
    if adapted:
        targets = rng.choice([(), ("q_proj", "v_proj"), ("o_proj", "up_proj"), ("down_proj",)])
        finetune = FinetuneConfig(method="lora", r=rng.choice([4, 16]), targets=targets)
        resolved = replace(resolved, config=resolved.config.model_copy(update={"finetune": finetune}))
    job = Job(resolved.dimensions, MACHINES["p5.48xlarge"], 1, resolved.config)
    attention: Attention = rng.choice(["probabilities", "fused", "grouped"])
    job.__dict__["attention"] = attention  # of another device than the traced one
    return resolved, job, rng.randrange(pp), attention


def draw_first_block(seed: int) -> tuple[Resolved, Job, int, Attention]:
    """A layout with one block in each chunk of a rank, and adapters in some layers of each block."""
    drawn, _, _, attention = draw(seed * 1000, adapted=True)
    places = [("o_proj",), ("o_proj", "up_proj"), ("down_proj",), ("gate_proj", "down_proj"), ("up_proj",)]
    rng = Random(seed)
    targets = rng.choice([*places, ("o_proj", "down_proj"), ("q_proj",), ()])
    parallel = drawn.config.parallel
    finetune = FinetuneConfig(method="lora", r=Random(seed).choice([4, 16]), targets=targets)
    model = drawn.model.model_copy(update={"num_hidden_layers": parallel.pp * parallel.virtual_pp})
    resolved = replace(drawn, model=model, config=drawn.config.model_copy(update={"finetune": finetune}))
    job = Job(resolved.dimensions, MACHINES["p5.48xlarge"], 1, resolved.config)
    job.__dict__["attention"] = attention
    return resolved, job, 0, attention


@pytest.mark.parametrize("seed", one_in(5, FIRST_BLOCK))
def test_memory_of_a_first_block_beside_adapters_is_within_a_tenth_of_a_traced_step(seed: int) -> None:
    _hold(*draw_first_block(seed))


@pytest.mark.parametrize(
    ("seed", "adapted"),
    one_in(5, [*((seed, False) for seed in range(DRAWN)), *((seed, True) for seed in range(ADAPTED))]),
)
def test_memory_of_drawn_ranks_is_within_a_tenth_of_a_traced_step(seed: int, adapted: bool) -> None:
    _hold(*draw(seed, adapted=adapted))


@pytest.mark.parametrize("seed", one_in(3, range(DOCUMENTS)))
def test_memory_of_attention_by_blocks_is_within_a_tenth_of_a_traced_step(seed: int) -> None:
    drawn, _, stage, _ = draw(seed)
    changes = {
        "data": drawn.config.data.model_copy(update={"doc_mask": True}),
        "train": drawn.config.train.model_copy(update={"seq_len": 1024}),  # blocks are a good part of the memory
    }
    resolved = replace(drawn, config=drawn.config.model_copy(update=changes))
    job = Job(resolved.dimensions, MACHINES["trn2.48xlarge"], 1, resolved.config)
    assert job.attention == "blocked"
    _hold(resolved, job, stage, "blocked")


def _hold(resolved: Resolved, job: Job, stage: int, attention: Attention) -> None:
    """Compare the prediction for a rank with its traced step."""
    parallel = resolved.config.parallel
    rank = stage * parallel.tp * parallel.dp
    traced = trace_rank(resolved, job.world, rank, RANKS_PER_NODE, attention)
    predicted = memory.stage_bytes(job, stage)
    state = (predicted.params, predicted.frozen, predicted.optimizer)
    assert state == (traced.params, traced.frozen, traced.optimizer)
    assert predicted.total - predicted.workspace == pytest.approx(traced.total, rel=TOLERANCE)


def test_a_trace_of_one_rank_of_a_large_world_is_beside_the_prediction() -> None:
    """4,096 ranks, of which one is built; its state has no storage here."""
    result = answer(SEVEN, "model.config.num_hidden_layers=2", "model.config.vocab_size=4000", "--trace")
    assert result["trace"].keys() == {"params", "frozen", "optimizer", "step", "total"}
    for kind in ("params", "optimizer"):
        assert result["trace"][kind]["predicted"] == result["trace"][kind]["traced"] == result["bytes"][kind]
    total = result["trace"]["total"]
    assert total["predicted"] == result["bytes"]["total"] - result["bytes"]["workspace"]
    assert total["predicted"] == pytest.approx(total["traced"], rel=TOLERANCE)
    assert "trace" not in answer(SEVEN)


RECIPES = {
    "qwen3_30b_a3b_cuda": ("model.config.num_hidden_layers=2", "model.config.vocab_size=4096", "train.global_batch=16"),
    "qwen3_30b_a3b_trn2": ("model.config.num_hidden_layers=1", "train.global_batch=32"),
    "llama3_8b_128k": ("model.config.num_hidden_layers=1", "train.global_batch=2"),
    "llama3_70b_32k_trn2": ("model.config.num_hidden_layers=2", "train.global_batch=1"),
}
"""Recipes with experts that ranks divide, and with context parallelism, in some of their layers."""


@pytest.mark.parametrize("recipe", one_in(2, RECIPES))
def test_a_rank_of_a_recipe_takes_the_planned_memory(recipe: str) -> None:
    result, _ = predict(CONFIGS / f"{recipe}.toml", RECIPES[recipe], Question(), Assumptions())
    predicted, traced = trace_job(result.job, result.stage).compared_with(result.bytes)["total"]
    assert predicted == pytest.approx(traced, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--search", "--trace"), "--search compares many layouts"),
        (("--model", "gpt3-175b", "--trace", "train.seq_len=2048"), "no code for gpt3-175b"),
        (("--method", "qlora", "--trace", "--instance", "p5", "parallel.tp=4", "parallel.dp=0"), "shapes only"),
    ],
)
def test_what_cannot_be_traced_is_refused(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        answer(SEVEN, *argv)


def test_offloaded_parameters_cannot_be_told_from_others() -> None:
    _, job, _, _ = draw(0)
    parallel = job.config.parallel.model_copy(update={"offload": ("params", "optimizer")})
    offloaded = Job(job.dimensions, job.machine, 1, job.config.model_copy(update={"parallel": parallel}))
    with pytest.raises(ConfigError, match="cannot separate tensors of host and device"):
        trace_job(offloaded, 0)


def test_live_bytes_follow_views_frees_and_resized_storages() -> None:
    counted = torch.zeros(8)
    with LiveBytes([counted]) as live:
        x = torch.zeros(100)
        y = x.view(10, 10)
        counted.add_(1)
        assert live.now == 400
        z = torch.zeros(50)
        assert (live.now, live.peak) == (600, 600)
        del z
        gc.collect()
        assert (live.now, live.peak) == (400, 600)
        x.untyped_storage().resize_(0)
        assert live.now == 0
        x.untyped_storage().resize_(400)
        torch.zeros(100)
        assert (live.now, live.peak) == (400, 800)
        del x, y
        gc.collect()
        assert live.now == 0
    assert torch.UntypedStorage.resize_.__name__ == "resize_"


def test_every_attention_has_a_traced_form() -> None:
    drawn, job, _, _ = draw(3)
    resolved = changed(drawn, train={"remat": "none"})  # which keeps what the attention saves
    sizes = {kind: trace_rank(resolved, job.world, 0, RANKS_PER_NODE, kind).step for kind in get_args(Attention)}
    assert sizes["scores"] > sizes["probabilities"] > sizes["fused"] >= sizes["grouped"]
    assert sizes["scores"] > sizes["blocked"] > sizes["grouped"]
