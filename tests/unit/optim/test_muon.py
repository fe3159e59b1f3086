"""Muon on one rank: updates of torch.optim.Muon for matrices, those of AdamW for the rest, under every rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import _muon as torch_muon

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.torch_kernels import FusedKernels, PlainKernels
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Init, Layout, ParamTable, Segment, ShardSpec, global_name
from nxtrain.config.schema import OptimConfig
from nxtrain.optim.muon import Muon
from nxtrain.optim.update_rules import Nearest
from nxtrain.parallel.precision import Update
from nxtrain.parallel.whole_matrices import WholeMatrices
from tests.support.adamw import host, precision, wide_newton_schulz
from tests.support.drawn_schedules import follow_by_hand
from tests.support.models import random

STEPS = 12
SCALE = 0.25
BF16, FP32 = torch.bfloat16, torch.float32
KERNELS: dict[str, Callable[[], Kernels]] = {"cpu": CpuKernels, "fused": FusedKernels, "plain": PlainKernels}
MUON: dict[str, Any] = {"name": "muon", "adam_lr": 3e-3, "lr": 1e-2, "weight_decay": 0.1}
RULES: list[tuple[Update, torch.dtype, torch.dtype]] = [
    ("fp32", FP32, FP32),
    ("fp32_master", BF16, FP32),
    ("bf16_stochastic", BF16, FP32),
    ("bf16_stochastic", BF16, BF16),
    ("bf16_kahan", BF16, FP32),
    ("bf16_kahan", BF16, BF16),
]


def drawn_table(seed: int) -> ParamTable:
    """Fused matrices stacked along either dimension, single matrices, rows, and parameters that AdamW updates."""
    rng = Random(f"muon/{seed}")

    def size() -> int:
        return rng.randint(1, 40)

    rows = tuple(Segment(name, size()) for name in ("q", "k", "v"))
    columns = tuple(Segment(f"experts.{index}.down", size()) for index in range(3))
    table = {
        "embedding": ShardSpec((size(), size())),
        "a.rows.weight": ShardSpec((sum(s.size for s in rows), size()), dim=0, segments=rows),
        "a.columns.weight": ShardSpec((size(), sum(s.size for s in columns)), dim=1, segments=columns),
        "a.single.weight": ShardSpec((size(), size()), dim=rng.choice((0, 1))),
        "a.replicated.weight": ShardSpec((1, size())),
        "norm": ShardSpec((size(),), decay=False, init=Init("ones")),
    }
    return ParamTable(table)


def muon(
    table: ParamTable,
    shards: Mapping[str, Tensor],
    kernels: Kernels | None = None,
    types: tuple[Update, torch.dtype, torch.dtype] = ("fp32", FP32, FP32),
    **optim: Any,
) -> Muon:
    """Optimizer on one rank."""
    mesh = Mesh.build(1, 0)
    hidden = {name: spec for name, spec in table.items() if name.startswith("a.")}
    matrices = WholeMatrices(hidden, mesh, 1, C10dCollectives(1), host)
    update, params, state = types
    return Muon(
        shards,
        Layout(table, mesh),
        kernels or CpuKernels(),
        host,
        matrices,
        precision=precision(params, update, state),
        seed=0,
        optim=OptimConfig.model_validate({**MUON, **optim}),
    )


def first(table: ParamTable, dtype: torch.dtype = FP32) -> dict[str, Tensor]:
    return {name: random(*spec.shape, seed=i).to(dtype) for i, (name, spec) in enumerate(table.items())}


def grads_of(table: ParamTable, step: int) -> dict[str, Tensor]:
    return {name: random(*spec.shape, seed=50 * step + i) for i, (name, spec) in enumerate(table.items())}


def trained(optimizer: Muon, table: ParamTable, steps: range = range(STEPS)) -> None:
    for step in steps:
        rate = torch.tensor(MUON["lr"] * step / STEPS)
        optimizer.step(grads_of(table, step), rate, torch.tensor(SCALE))


def torchs(table: ParamTable, **optim: Any) -> dict[str, Tensor]:
    """Parameters, by the names of their segments, after the steps of torch's optimizers."""
    config = OptimConfig.model_validate({**MUON, **optim})

    def split(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        parts = {}
        for name, tensor in tensors.items():
            spec = table[name]
            for segment, part in zip(
                spec.segments, tensor.split([s.size for s in spec.segments], spec.dim or 0), strict=True
            ):
                parts[global_name(name, segment)] = part.contiguous()
        return parts

    parameters = {name: nn.Parameter(part) for name, part in split(first(table)).items()}
    hidden = [p for name, p in parameters.items() if name not in ("embedding", "norm")]
    scale = {"original": "original", "moonlight": "match_rms_adamw"}[config.muon_scale]
    rule: dict[str, Any] = {
        "nesterov": config.muon_nesterov,
        "ns_steps": config.muon_steps,
    }
    matrices = torch.optim.Muon(hidden, momentum=config.muon_momentum, adjust_lr_fn=scale, **rule)
    groups: list[dict[str, Any]] = [
        {"params": [parameters["embedding"]]},
        {"params": [parameters["norm"]], "decays": False},
    ]
    others = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps)
    for optimizer, rate in ((matrices, config.lr), (others, config.adam_lr or config.lr)):
        follow_by_hand(optimizer, config, rate, lambda step: (step - 1) / STEPS)
    for step in range(STEPS):
        for name, grad in split(grads_of(table, step)).items():
            parameters[name].grad = grad * SCALE
        matrices.step()
        others.step()
    return {name: p.detach() for name, p in parameters.items()}


def errors(table: ParamTable, shards: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest difference of each segment from the expected one."""
    results = {}
    for name, tensor in shards.items():
        spec, start = table[name], 0
        for segment in spec.segments:
            part = tensor.narrow(spec.dim or 0, start, segment.size)
            results[global_name(name, segment)] = (part - expected[global_name(name, segment)]).abs().max().item()
            start += segment.size
    return results


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "optim",
    [{}, {"muon_scale": "original", "muon_nesterov": False}, {"adam_lr": 0.0, "muon_momentum": 0.8, "muon_steps": 3}],
    ids=["moonlight", "original", "short"],
)
def test_updates_are_those_of_torch(monkeypatch: pytest.MonkeyPatch, kernels: str, optim: dict[str, Any]) -> None:
    """The iteration of torch computes in float32 here; that in bfloat16 has errors of percents."""
    monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", wide_newton_schulz())
    for seed in range(4):
        table = drawn_table(seed)
        shards = first(table)
        trained(muon(table, shards, KERNELS[kernels](), **optim), table)
        assert max(errors(table, shards, torchs(table, **optim)).values()) < 1e-6


def test_bf16_products_move_weights_as_far_from_float32_as_those_of_torch() -> None:
    table = drawn_table(1)
    actual, exact = first(table), first(table)
    trained(muon(table, actual, muon_precision="bf16"), table)
    trained(muon(table, exact), table)
    theirs = max(errors(table, exact, torchs(table)).values())
    ours = max((actual[name] - exact[name]).abs().max().item() for name in table)
    assert 0 < ours < 3 * theirs < 3e-3


def test_a_fused_matrix_that_is_not_split_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_muon, "_zeropower_via_newtonschulz", wide_newton_schulz())
    table = drawn_table(0)
    whole = {}
    for name, spec in table.items():
        whole[name] = ShardSpec(spec.shape, dim=spec.dim, decay=spec.decay)
    shards = first(table)
    trained(muon(ParamTable(whole), shards), table)
    result = errors(table, shards, torchs(table))
    for name, error in result.items():
        is_fused = name.startswith(("a.q", "a.k", "a.v", "a.experts"))
        assert (error > 1e-3) == is_fused, name


def test_masters_are_the_weights_of_a_run_in_float32() -> None:
    table = drawn_table(2)
    narrow = first(table, BF16)
    wide = {name: tensor.float() for name, tensor in narrow.items()}
    optimizer, reference = muon(table, narrow, types=("fp32_master", BF16, FP32)), muon(table, wide)
    trained(optimizer, table)
    trained(reference, table)
    for name, master in optimizer.state["master"].items():
        assert torch.equal(master, wide[name]), name
        assert torch.equal(narrow[name], wide[name].to(BF16)), name


@pytest.mark.parametrize("update", ["bf16_stochastic", "bf16_kahan"])
def test_small_updates_of_bf16_weights_arrive_on_average(update: Update) -> None:
    """Each of forty updates is far below half the distance to the next number."""
    table = ParamTable({"a.weight": ShardSpec((96, 64))})
    optim: dict[str, Any] = {"weight_decay": 0.0}
    start = first(table, BF16)
    narrow = {name: x.clone() for name, x in start.items()}
    wide = {name: x.float() for name, x in start.items()}
    rounded = muon(table, narrow, types=(update, BF16, FP32), **optim)
    for optimizer in (rounded, muon(table, wide, **optim)):
        for step in range(40):
            optimizer.step(grads_of(table, step % 3), torch.tensor(1e-4), torch.tensor(1.0))
    kept = narrow["a.weight"].float()
    if "compensation" in rounded.state:
        kept += rounded.state["compensation"]["a.weight"]
    moved = (kept - start["a.weight"].float()).flatten()
    wanted = (wide["a.weight"] - start["a.weight"].float()).flatten()
    along = (moved @ wanted / (wanted @ wanted)).item()
    assert along == pytest.approx(1, abs=0.1)


def test_a_momentum_in_bf16_is_rounded_at_random_and_one_rounded_to_nearest_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gradient far below half the distance between numbers of the momentum still arrives in it."""

    def mean() -> float:
        table = ParamTable({"a.weight": ShardSpec((64, 64))})
        optimizer = muon(table, first(table, BF16), types=("bf16_stochastic", BF16, BF16), muon_momentum=0.999)
        momentum = optimizer.state["momentum_buffer"]["a.weight"]
        assert momentum.dtype == BF16
        momentum.fill_(1.0)
        for _ in range(100):
            optimizer.step({"a.weight": torch.full((64, 64), 0.5)}, torch.tensor(0.0), torch.tensor(1.0))
        return momentum.float().mean().item()

    wanted = 0.5 + 0.5 * 0.999**100
    assert mean() == pytest.approx(wanted, abs=1e-3)
    monkeypatch.setattr(Muon, "_stochastic", lambda self, kind, value, rows: Nearest(value))
    assert abs(mean() - wanted) > 0.04


def held(optimizer: Muon, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bits of the weights and of all state."""
    kinds = {"param": shards, **optimizer.state}
    bits = {2: torch.int16, 4: torch.int32}
    results = {}
    for kind, tensors in kinds.items():
        for name, x in tensors.items():
            results[f"{kind} {name}"] = x.view(bits[x.dtype.itemsize]).clone()
    return results


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("types", RULES, ids=str)
def test_a_skipped_step_changes_no_bit(kernels: str, types: tuple[Update, torch.dtype, torch.dtype]) -> None:
    table = drawn_table(3)
    shards = first(table, types[1])
    optimizer = muon(table, shards, KERNELS[kernels](), types)
    trained(optimizer, table, range(3))
    if "compensation" in optimizer.state:
        optimizer.state["compensation"]["a.single.weight"].view(-1)[0] = 2.0**-40
    before = held(optimizer, shards)
    grads = grads_of(table, 5)
    grads["a.rows.weight"].view(-1)[0] = float("nan")
    optimizer.step(grads, torch.tensor(1e-2), torch.tensor(float("nan")), torch.tensor(True))
    after = held(optimizer, shards)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    optimizer.step(grads_of(table, 6), torch.tensor(1e-2), torch.tensor(SCALE), torch.tensor(False))
    assert not torch.equal(held(optimizer, shards)["param a.rows.weight"], before["param a.rows.weight"])
    assert all(x.isfinite().all() for x in shards.values())


@pytest.mark.parametrize("types", RULES, ids=str)
def test_state_that_is_copied_goes_on_with_the_same_bits(types: tuple[Update, torch.dtype, torch.dtype]) -> None:
    table = drawn_table(4)
    shards = first(table, types[1])
    optimizer = muon(table, shards, types=types)
    assert set(optimizer.state["momentum_buffer"]) == {name for name in table if name.startswith("a.")}
    assert set(optimizer.state["exp_avg"]) == set(optimizer.state["exp_avg_sq"]) == {"embedding", "norm"}
    trained(optimizer, table, range(4))
    others = {name: x.clone() for name, x in shards.items()}
    resumed = muon(table, others, types=types)
    for kind, tensors in optimizer.state.items():
        for name, x in tensors.items():
            resumed.state[kind][name].copy_(x)
    resumed.num_updates.copy_(optimizer.num_updates)
    trained(optimizer, table, range(4, 8))
    trained(resumed, table, range(4, 8))
    assert all(torch.equal(others[name], x) for name, x in shards.items())


def test_updates_that_bf16_would_lose_are_counted_in_every_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nxtrain.optim.adamw.MARKED_ENTRIES", 100)
    table = drawn_table(5)
    shards = first(table, BF16)
    optimizer = muon(table, shards, types=("bf16_stochastic", BF16, FP32))
    trained(optimizer, table, range(1, 3))
    for rate, wanted in ((1e-7, 1.0), (10.0, 0.0)):
        marks = dict(optimizer.lost_updates(torch.tensor(rate)))
        assert list(marks) == list(table)
        for name, mark in marks.items():
            assert mark.shape == shards[name].shape
            assert mark.mean().item() == pytest.approx(wanted, abs=0.05), (rate, name)
