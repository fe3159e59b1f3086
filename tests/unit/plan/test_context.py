"""Plans of context parallelism: sizes fall with cp, traffic follows the formula, work is uneven as the cut is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nxtrain.common.machines import MACHINES
from nxtrain.plan.activations import block_bytes, boundary_bytes
from nxtrain.plan.command import Question, predict
from nxtrain.plan.context import context_bytes, work_share
from nxtrain.plan.job import Job
from nxtrain.plan.memory import stage_bytes
from nxtrain.plan.predict import Assumptions
from nxtrain.plan.search import impossible, search
from nxtrain.plan.speed import step_time
from nxtrain.tools.trace.fake_rank import trace_job
from tests.support.models import plan
from tests.support.published import CONFIGS

HEADS, KV_HEADS, WIDTH, LAYERS = 8, 4, 16, 2
SHAPE = {
    "vocab_size": 1000,
    "hidden_size": HEADS * WIDTH,
    "intermediate_size": 352,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 1 << 17,
}
SEQ_LEN, MASTER = 16_384, {"params": "bf16", "update": "fp32_master"}


def job_of(
    parallel: dict[str, Any],
    backend: str = "cuda",
    attention: str = "auto",
    shape: dict[str, Any] = SHAPE,
    **train: Any,
) -> Job:
    degrees = {"dp": 1, **parallel}
    batches = {"seq_len": SEQ_LEN, "micro_batch": 1, "global_batch": 2 * degrees["dp"], **train}
    resolved = plan(
        "mha",
        model={"config": shape},
        parallel=degrees,
        train=batches,
        precision=MASTER,
        backend={"name": backend, "attention": attention},
    )
    return Job(resolved.dimensions, MACHINES["p5.48xlarge"], 1, resolved.config)


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_kept_activations_of_a_rank_fall_as_the_degree_rises(remat: str) -> None:
    kept = {cp: block_bytes(job_of({"cp": cp}, remat=remat)) for cp in (1, 2, 4, 8)}
    for cp in (2, 4, 8):
        assert kept[cp] * cp == pytest.approx(kept[1], rel=0.05), cp


WIDE = SHAPE | {"intermediate_size": 64, "vocab_size": 64, "num_key_value_heads": HEADS, "head_dim": 64}
"""A model whose attention takes most of the memory."""


@pytest.mark.parametrize("method", ["gather", "auto"])
@pytest.mark.parametrize(
    ("layout", "attention"),
    [
        ({}, "plain"),
        ({"tp": 2, "sequence_parallel": True, "shard": "zero1"}, "plain"),
        ({"cp_layout": "contiguous"}, "flash"),
        ({"shard": "full", "dp": 2}, "flash"),
        ({"cp": 4}, "flash"),
    ],
)
def test_a_rank_on_fake_tensors_takes_the_planned_memory(method: str, layout: dict[str, Any], attention: str) -> None:
    """By FlashAttention of runs of queries, and by the scores of blocks of queries."""
    parallel = {"cp": 2, "cp_method": method, **layout}
    job = job_of(parallel, attention=attention, shape=WIDE, seq_len=2048)
    traced, planned = trace_job(job, 0), stage_bytes(job, 0)
    assert (planned.params, planned.optimizer) == (traced.params, traced.optimizer)
    assert planned.total - planned.workspace == pytest.approx(traced.total, rel=0.1)
    other = "plain" if attention == "flash" else "flash"
    wrong = stage_bytes(job_of(parallel, attention=other, shape=WIDE, seq_len=2048), 0)
    assert wrong.total - wrong.workspace != pytest.approx(traced.total, rel=0.1)


def changed(job: Job, **parallel: Any) -> Any:
    return job.config.model_copy(update={"parallel": job.config.parallel.model_copy(update=parallel)})


@pytest.mark.parametrize(("method", "gradient_hops"), [("gather", 3), ("ring", 4)])
@pytest.mark.parametrize("remat", ["none", "selective"])
def test_bytes_over_cp_are_those_of_the_formula(method: str, gradient_hops: int, remat: str) -> None:
    job = job_of({"cp": 4, "cp_method": method}, remat=remat)
    block = 2 * SEQ_LEN // 4 * KV_HEADS * WIDTH
    forward, backward = context_bytes(job, LAYERS)
    assert forward == LAYERS * 3 * block * 2
    again = 2 if remat == "none" else 4
    assert backward == LAYERS * block * (3 * again + 4 * gradient_hops)
    (sent,) = [transfer for transfer in step_time(job).traffic if transfer.axis == "cp"]
    assert (sent.link, sent.bytes) == ("device", job.num_micro * (forward + backward))
    (across,) = [transfer for transfer in step_time(job_of({"cp": 8, "tp": 2})).traffic if transfer.axis == "cp"]
    assert across.link == "network"


def test_uneven_cuts_wait_for_the_rank_with_most_pairs() -> None:
    shares = {}
    for layout in ("contiguous", "zigzag", "striped"):
        shares[layout] = work_share(job_of({"cp": 4, "cp_layout": layout}), skips=True)
    assert shares["contiguous"] == pytest.approx(1.75, rel=1e-3)
    assert shares["zigzag"] == pytest.approx(1.0)
    assert shares["striped"] == pytest.approx(1.0, rel=1e-3)
    assert work_share(job_of({"cp": 4}), skips=False) == pytest.approx(2.0, rel=1e-3)


def test_state_is_shared_and_gradients_are_summed_over_dp_and_cp() -> None:
    over_cp, over_dp = job_of({"cp": 4, "shard": "zero1"}), job_of({"dp": 4, "shard": "zero1"})
    assert over_cp.shard_size == over_dp.shard_size == 4
    assert stage_bytes(over_cp, 0).optimizer == stage_bytes(over_dp, 0).optimizer
    sent = [[transfer for transfer in step_time(job).traffic if transfer.axis == "dp"] for job in (over_cp, over_dp)]
    assert sent[0][0].bytes == sent[1][0].bytes


def test_a_search_divides_long_sequences_alone_and_refuses_what_a_run_refuses() -> None:
    degrees = {}
    for seq_len in (4096, SEQ_LEN):
        job = job_of({}, seq_len=seq_len, global_batch=8)
        result = search(job.dimensions, job.machine, 1, job.config, Assumptions())
        degrees[seq_len] = {layout.job.config.parallel.cp for layout in result.layouts}
    assert degrees == {4096: {1}, SEQ_LEN: {1, 2, 4}}
    job = job_of({"cp": 2, "cp_method": "ring"})
    assert [*impossible(job)] == []
    on_xla = job.config.model_copy(update={"backend": job.config.backend.model_copy(update={"name": "neuron"})})
    assert [problem.key for problem in impossible(replace(job, config=on_xla))] == ["parallel.cp_method"]
    odd = replace(job, config=changed(job, cp=3))
    assert [problem.key for problem in impossible(odd)] == ["train.seq_len"]


def test_utilization_counts_operations_of_the_model_alone() -> None:
    job = job_of({"cp": 4})
    time = step_time(job)
    flops = job.dimensions.flops_per_token(SEQ_LEN) * job.tokens_per_step
    assert time.mfu == pytest.approx(flops / (time.step_s * 4 * job.machine.device_flops))


@pytest.mark.parametrize(
    ("name", "cp", "gib"),
    [("llama3_8b_128k", 8, 32), ("llama3_70b_32k_trn1", 8, 8), ("llama3_70b_32k_trn2", 8, 16)],
)
def test_a_long_context_recipe_fits_its_machines(name: str, cp: int, gib: int) -> None:
    path = CONFIGS / f"{name}.toml"
    result, note = predict(path, [], Question(), Assumptions())
    parallel = result.job.config.parallel
    assert (result.reasons, note, parallel.cp) == ([], "", cp)
    assert result.job.world == result.job.machine.devices * result.job.nodes
    assert result.bytes.total < gib << 30
    alone = replace(result.job, config=changed(result.job, cp=1, dp=cp))
    assert boundary_bytes(alone) == cp * boundary_bytes(result.job)
