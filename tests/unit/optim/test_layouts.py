"""Every rule gives every entry of the model the same bits, however the model is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import Layout, ParamTable, Segment, ShardSpec, global_name
from nxtrain.config.schema import OptimConfig
from nxtrain.optim import adamw as adamw_module
from nxtrain.optim.adamw import AdamW
from nxtrain.optim.rounding import rounding_keys
from nxtrain.parallel.precision import Update
from tests.support.adamw import cut, host, part, precision
from tests.support.models import random

STEPS = 4
ADAM = OptimConfig(betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

WHOLE = {
    "a.q_proj.weight": (24, 10),
    "a.k_proj.weight": (4, 10),
    "a.v_proj.weight": (4, 10),
    "o_proj.weight": (9, 26),  # over 2 and 4 ranks it is cut at an odd column
    "embed.weight": (37, 10),
    "norm.weight": (11,),
}
"""Shapes of the model's tensors by global name."""


def table(*, replicas: int, fused: bool) -> ParamTable:
    """The model's parameters, with each K/V head on `replicas` ranks."""
    parts = [Segment("q_proj", 24), Segment("k_proj", 4, replicas), Segment("v_proj", 4, replicas)]
    qkv = {
        f"a.{part.name}.weight": ShardSpec((part.size, 10), dim=0, segments=(Segment("", part.size, part.replicas),))
        for part in parts
    }
    if fused:
        qkv = {"a.qkv_proj.weight": ShardSpec((32, 10), dim=0, segments=tuple(parts))}
    return ParamTable(
        {
            **qkv,
            "o_proj.weight": ShardSpec((9, 26), dim=1),
            "embed.weight": ShardSpec((37, 10), dim=0),
            "norm.weight": ShardSpec((11,), decay=False),
        }
    )


def shapes(layout: Layout) -> dict[str, Tensor]:
    """Tensors of a rank's shapes, as many rows on each rank."""
    local = {name: spec.local_shape(layout.mesh.tp) for name, spec in layout.table.items()}
    return {name: torch.empty(-(-rows // layout.mesh.shard_size), *rest) for name, (rows, *rest) in local.items()}


def trained(update: Update, state: torch.dtype, *, tp: int, shard: int, fused: bool = True, replicas: int = 1) -> Any:
    """Parameters and state after some steps on every rank, whole, by kind and global name; copies must agree."""
    params = torch.float32 if update == "fp32" else torch.bfloat16
    start = {name: random(*shape, seed=i).to(params) for i, (name, shape) in enumerate(WHOLE.items())}
    found: dict[str, dict[str, Tensor]] = {}
    for rank in range(tp * shard):
        layout = Layout(table(replicas=replicas, fused=fused), Mesh.build(tp * shard, rank, tp=tp, shard=shard))
        shards = cut(layout, start, shapes(layout))
        adamw = AdamW(
            shards, layout, CpuKernels(), host, precision=precision(params, update, state), seed=7, optim=ADAM
        )
        for step in range(STEPS):
            grads = {name: random(*shape, seed=100 * step + i) for i, (name, shape) in enumerate(WHOLE.items())}
            adamw.step(cut(layout, grads, shards), torch.tensor(1e-3), torch.tensor(0.7))
        for kind, tensors in {"param": shards, **adamw.state}.items():
            for name, blocks in layout.items():
                for block in blocks:
                    key, local = global_name(name, block.segment), block.of(tensors[name])
                    into = part(found.setdefault(kind, {}).setdefault(key, local.new_zeros(WHOLE[key])), block)
                    if block.copy:
                        assert torch.equal(into, local), "copies of a K/V head drift apart"
                    into.copy_(local)
    return found


@pytest.mark.parametrize(
    ("update", "state"),
    [
        ("fp32", torch.float32),
        ("fp32_master", torch.float32),
        ("bf16_stochastic", torch.float32),
        ("bf16_stochastic", torch.bfloat16),
        ("bf16_kahan", torch.bfloat16),
    ],
    ids=["fp32", "master", "stochastic", "stochastic-bf16-state", "kahan-bf16-state"],
)
def test_an_update_is_the_same_bit_for_bit_in_every_layout(update: Update, state: torch.dtype) -> None:
    expected = trained(update, state, tp=1, shard=1)
    layouts: list[dict[str, Any]] = [
        {"tp": 1, "shard": 1, "fused": False},
        {"tp": 1, "shard": 3},
        {"tp": 2, "shard": 1},
        {"tp": 2, "shard": 2, "fused": False},
        {"tp": 4, "shard": 1, "replicas": 2},
        {"tp": 4, "shard": 5, "replicas": 4},
    ]
    for layout in layouts:
        found = trained(update, state, **layout)
        for kind, tensors in expected.items():
            for name, tensor in tensors.items():
                assert torch.equal(found[kind][name], tensor), (layout, kind, name)


def test_a_key_that_knew_the_rank_would_let_copies_drift_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def ranked(layout: Layout, shards: Any, kind: str, seed: int, put: Any) -> Any:
        return rounding_keys(layout, shards, kind, seed + layout.mesh.rank, put)

    monkeypatch.setattr(adamw_module, "rounding_keys", ranked)
    with pytest.raises(AssertionError, match="drift apart"):
        trained("bf16_stochastic", torch.float32, tp=2, shard=1)
