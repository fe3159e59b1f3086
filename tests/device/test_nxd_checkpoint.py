"""NeuronX Distributed reads the rank files that we write, and we read those that it writes, for its example's Llama.

References: the scores that either side computes from the files, and, for the optimizer, the state that NxD has after
the same update on one rank, by the names of its parameters.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nxtrain.backends import open_backend
from nxtrain.backends.base import Backend
from nxtrain.checkpoint.convert.nxd_read import nxd_to_nxtrain
from nxtrain.checkpoint.convert.nxd_write import NxdTarget, OptimizerSettings, nxtrain_to_nxd
from nxtrain.checkpoint.convert.verify_export import open_model
from nxtrain.checkpoint.load import load
from nxtrain.checkpoint.meta import Meta
from nxtrain.common.errors import CheckpointError
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout
from nxtrain.config.check import Resolved
from nxtrain.config.schema import OptimConfig
from tests.support import nxd_golden
from tests.support.models import changed
from tests.support.nxd_cpu import PLATFORM
from tests.support.nxd_golden import GLOBAL_BATCH, OPTIM, Case, our_plan, token_rows
from tests.support.nxd_oracle import _load_example, _model, _prepare
from tests.support.nxd_stages import micro_rows, pipeline_batch, pipeline_config
from tests.support.parity import relative_errors, table_of
from tests.support.ranks import RankPool
from tests.support.run_folders import blank, cut, meta, same, save

TAG = "step_1"


class Seen(NamedTuple):
    """Scores and weights of a rank."""

    logits: Tensor | None
    weights: Mapping[str, Tensor]
    means: Mapping[str, Tensor]
    user_content: Any = None


@contextmanager
def sized(case: Case) -> Iterator[None]:
    """Give the golden model a vocabulary that the ranks of a case divide."""
    nxd_golden.weights.cache_clear()
    with patch.dict(nxd_golden.MODEL, vocab_size=130 if case.tp <= 2 else 132):
        yield
    nxd_golden.weights.cache_clear()


def rows() -> Tensor:
    """(sequences, length) tokens."""
    return torch.from_numpy(token_rows().astype("int64"))[:GLOBAL_BATCH]


def train_and_save(backend: Backend, case: Case, example: Path, folder: Path, platform: str, use_xser: bool) -> Seen:
    """One update, then a checkpoint."""
    with sized(case), _opened(backend, case, example, platform) as (nxd, model, optimizer, names):
        from neuronx_distributed.parallel_layers import parallel_state

        mine = rows().chunk(case.dp)[parallel_state.get_data_parallel_rank()]
        if case.pp > 1:
            model.run_train(**pipeline_batch(case, mine))
        else:
            inputs, labels = micro_rows(mine)
            model(input_ids=inputs, attention_mask=None, labels=labels).loss.backward()
        optimizer.step()
        _save(nxd, folder, model, optimizer, use_xser)
        return _seen(case, model, optimizer, names)


def load_and_save(backend: Backend, case: Case, example: Path, folder: Path, platform: str, again: Path) -> Seen:
    """Load the newest checkpoint into a model of other weights, and save it as NxD does."""
    with sized(case), _opened(backend, case, example, platform) as (nxd, model, optimizer, names):
        with torch.no_grad():
            for parameter in _parameters(case, model).values():
                parameter.fill_(7.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        content = nxd.load_checkpoint(str(folder), model=model, optimizer=optimizer, scheduler=scheduler)
        _save(nxd, again, model, optimizer, use_xser=False)
        return _seen(case, model, optimizer, names)._replace(user_content=(content, scheduler.last_epoch))


def _save(nxd: Any, folder: Path, model: Any, optimizer: Any, use_xser: bool) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    content = {"total_steps": 1, "batch_idx": 0, "epoch": 0, "cli_args": {"lr": 1.0}}
    nxd.save_checkpoint(str(folder), TAG, model, optimizer, scheduler, content, use_xser=use_xser)


@contextmanager
def _opened(backend: Backend, case: Case, example: Path, platform: str) -> Iterator[tuple[Any, Any, Any, list[str]]]:
    os.environ[PLATFORM] = platform
    if backend.world == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _prepare()
    import neuronx_distributed as nxd
    import neuronx_distributed.trainer.checkpoint as module
    from neuronx_distributed.parallel_layers import parallel_state

    module.g_iostate = None
    mixed = {"mixed_precision_config": {"use_master_weights": True, "use_master_weights_in_ckpt": True}}
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=case.tp,
        pipeline_parallel_size=case.pp,
        pipeline_config=pipeline_config(case, _load_example(example)) if case.pp > 1 else None,
        optimizer_config={"zero_one_enabled": case.zero1, "grad_clipping": True, "max_grad_norm": case.clip},
        sequence_parallel=case.sequence_parallel,
        **(mixed if case.params == "bf16" else {}),
    )
    try:
        model = nxd.initialize_parallel_model(config, lambda: _model(case, example))
        named = _parameters(case, model)
        decayed = [name for name in named if "norm" not in name]
        plain = [name for name in named if "norm" in name]
        groups = [
            {"params": [named[name] for name in decayed], "weight_decay": OPTIM["weight_decay"]},
            {"params": [named[name] for name in plain], "weight_decay": 0.0},
        ]
        optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, groups, **OPTIM)
        yield nxd, model, optimizer, [*decayed, *plain]
    finally:
        parallel_state.destroy_kv_group()
        parallel_state.destroy_model_parallel()
        del os.environ[PLATFORM]
        if backend.world == 1:
            dist.destroy_process_group()


def _parameters(case: Case, model: Any) -> dict[str, torch.nn.Parameter]:
    return dict(model.local_named_parameters() if case.pp > 1 else model.named_parameters())


@torch.no_grad()
def _seen(case: Case, model: Any, optimizer: Any, names: list[str]) -> Seen:
    logits = None
    if case.pp == 1:
        inputs, _ = micro_rows(rows())
        logits = model(input_ids=inputs, attention_mask=None).logits.float()
    state = optimizer.state_dict()
    state = state["base_state"] if case.zero1 else state["state"]
    means = {name: state[number]["exp_avg"].clone() for number, name in enumerate(names)}
    weights = {name: parameter.detach().clone() for name, parameter in _parameters(case, model).items()}
    return Seen(logits, weights, means)


pytestmark = pytest.mark.nxd

ALONE = Mesh(1, 0)
ROUNDING = 2e-5
"""Of float32 sums in another order, over the few hundred terms of these models; relative to a tensor's norm."""

RATES = OptimizerSettings(OptimConfig(lr=3e-3, betas=(0.9, 0.95), eps=1e-5), lr=3e-3)

CASES: dict[str, tuple[Case, str]] = {
    "alone": (Case(), "trn1"),
    "tp2-zero1": (Case(tp=2, zero1=True), "trn1"),
    "dp2-zero1-tied": (Case(dp=2, zero1=True, tied=True), "trn1"),
    "tp2-dp2-zero1-bf16": (Case(tp=2, dp=2, zero1=True, params="bf16"), "trn1"),
    "dp4-zero1": (Case(dp=4, zero1=True), "trn1"),  # 130 rows of the embedding over four ranks
    "grouped": (Case(tp=2, qkv="grouped"), "trn1"),
    "fused-copied-trn1": (Case(tp=4, qkv="grouped_fused", kv_size_multiplier=2), "trn1"),
    "copied-trn2": (Case(tp=4, qkv="grouped", kv_size_multiplier=2), "trn2"),
    "pp2-zero1": (Case(pp=2, accumulation=2, zero1=True), "trn1"),
    "pp2-tied": (Case(pp=2, accumulation=2, tied=True), "trn1"),
}


def plan_of(case: Case) -> Resolved:
    with sized(case):
        plan = our_plan(Case(tied=case.tied), Path(), Path())
    return changed(plan, model={"fused_qkv": False, "fused_gate_up": False})


def layout_of(case: Case) -> Layout:
    return Layout(table_of(plan_of(case), ALONE), ALONE)


def config_file(folder: Path, case: Case) -> Path:
    plan = plan_of(case)
    (folder / "config.json").write_text(json.dumps(plan.family.to_hf(plan.model, "float32")), encoding="utf-8")
    return folder / "config.json"


def loaded(path: Path, case: Case, kinds: Mapping[str, torch.dtype]) -> dict[str, dict[str, Tensor]]:
    layout = layout_of(case)
    shards = blank(cut(layout.table, ALONE, kinds))
    load(path, shards, layout)
    return shards


def scores(path: Path, case: Case) -> Tensor:
    with sized(case):
        inputs, _ = micro_rows(rows())
    with torch.no_grad():
        return open_model(path, open_backend("cpu"), inputs.shape[1]).logits(inputs).float()


def gathered(case: Case, seen: list[Seen]) -> Tensor:
    """Whole scores of the first copy of the model."""
    return torch.cat([part for part in (rank.logits for rank in seen[: case.tp]) if part is not None], -1)


def by_our_names(result: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of one rank under NxD's names, with gate and up split into two."""
    parts: dict[str, Tensor] = {}
    for name, tensor in result.items():
        if "gate_up_proj" in name:
            gate, up = tensor.chunk(2)
            parts |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        else:
            parts[name] = tensor
    return parts


def type_of(case: Case) -> torch.dtype:
    return torch.bfloat16 if case.params == "bf16" else torch.float32


def kinds_of(case: Case) -> dict[str, torch.dtype]:
    wide = {"model": type_of(case), "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    return {**wide, "master": torch.float32} if case.params == "bf16" else wide


@pytest.mark.parametrize(
    ("name", "use_xser"),
    # The weights that the oracle starts from lie as on trn1.
    [*((name, False) for name, (_, platform) in CASES.items() if platform == "trn1"), ("tp2-dp2-zero1-bf16", True)],
)
def test_what_nxd_saved_is_read_right(pool: RankPool, example: Path, tmp_path: Path, name: str, use_xser: bool) -> None:
    case, platform = CASES[name]
    seen = pool.run(case.world, train_and_save, case, example, tmp_path / "nxd", platform, use_xser)
    file = config_file(tmp_path, case)
    drifts = case.tp > 1 and case.params == "bf16"
    if drifts:  # NxD sums gradients of norms over tp under sequence parallelism only, and each rank rounds its own
        with pytest.raises(CheckpointError, match=r"replicas of .*norm\.weight differ between ranks.*--first-copy"):
            nxd_to_nxtrain(tmp_path / "nxd", tmp_path / "ours", config=file)
    actual = nxd_to_nxtrain(tmp_path / "nxd", tmp_path / "ours", config=file, first_copy=drifts)
    assert (actual.step, actual.samples) == (1, 0)
    assert set(actual.kinds) == set(kinds_of(case))
    ours = loaded(tmp_path / "ours", case, kinds_of(case))
    if case.pp == 1:
        theirs = gathered(case, seen)
        bound = 2e-5 if case.params == "fp32" else 0.05
        assert (scores(tmp_path / "ours", case) - theirs).abs().max() < bound * theirs.abs().max()
    if case.params == "bf16":
        assert all(torch.equal(ours["master"][n].bfloat16(), weight) for n, weight in ours["model"].items())
        norms = {name: x for name, x in seen[0].weights.items() if "norm" in name}
        assert all(torch.equal(ours["model"][name], x) for name, x in norms.items())
        return
    if case.tp > 2:  # the weights of another vocabulary
        return
    (reference,) = pool.run(1, train_and_save, case.alone, example, tmp_path / "alone", "trn1", False)
    if case == case.alone:
        assert all(torch.equal(ours["model"][n], x) for n, x in by_our_names(reference.weights).items())
        assert all(torch.equal(ours["exp_avg"][n], x) for n, x in by_our_names(reference.means).items())
    errors = relative_errors(ours["exp_avg"], by_our_names(reference.means))
    assert max(errors.values()) < ROUNDING, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("name", CASES)
def test_nxd_loads_what_we_write(pool: RankPool, example: Path, tmp_path: Path, name: str) -> None:
    case, platform = CASES[name]
    plan = plan_of(case)
    kinds = kinds_of(case)
    layout = layout_of(case)
    shards = cut(layout.table, ALONE, kinds)
    for name_, weight in shards["model"].items():  # so that scores stay finite, and masters are those of the weights
        weight.sub_(1.0).mul_(0.1)
        if "master" in shards:
            shards["master"][name_].sub_(1.0).mul_(0.1)
            weight.copy_(shards["master"][name_])
    info: Meta = meta(
        step=1, config=plan.model.model_dump(mode="json"), dtype=str(type_of(case)).removeprefix("torch.")
    )
    save(tmp_path / "ours", shards, layout, info)
    qkv = {"separate": "separate", "grouped": "grouped", "grouped_fused": "fused"}[case.qkv]
    target = NxdTarget(
        tp=case.tp,
        pp=case.pp,
        dp=case.dp,
        copies=case.kv_size_multiplier,
        qkv=qkv,  # type: ignore[arg-type]
        platform=platform,  # type: ignore[arg-type]
        zero1=case.zero1,
    )
    nxtrain_to_nxd(tmp_path / "ours", tmp_path / "nxd", target, rates=RATES)
    seen = pool.run(case.world, load_and_save, case, example, tmp_path / "nxd", platform, tmp_path / "again")
    assert {rank.user_content[0]["total_steps"] for rank in seen} == {1}
    assert {rank.user_content[1] for rank in seen} == {1}  # the schedule's step
    if case.pp == 1:
        ours, theirs = scores(tmp_path / "ours", case), gathered(case, seen)
        bound = 2e-5 if case.params == "fp32" else 0.05
        assert (ours - theirs).abs().max() < bound * theirs.abs().max()
    # What NxD holds now, in files of its own writing, is what we began with, bit for bit.
    nxd_to_nxtrain(tmp_path / "again", tmp_path / "back", config=config_file(tmp_path, case))
    assert same(loaded(tmp_path / "back", case, kinds), shards)
