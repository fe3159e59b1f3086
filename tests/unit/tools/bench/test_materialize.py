"""Rank whose shard is made, and the bound on its memory."""

from __future__ import annotations

import pytest

from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.common.mesh import Mesh
from nxtrain.tools.bench.materialize import BuildTarget, bench_materialize, judge

GIB = 1 << 30


@pytest.mark.parametrize(("shard", "peak", "within"), [(10, 14, True), (10, 14.1, False), (1000, 1300, True)])
def test_the_bound_is_1_3_shards_and_one_gib(shard: float, peak: float, within: bool) -> None:
    result = judge({"shard_bytes": int(shard * GIB), "peak_bytes": int(peak * GIB)})
    assert result["bound_bytes"] == int(1.3 * int(shard * GIB)) + GIB
    assert result["within"] is within


def test_a_system_that_tells_no_peak_is_refused() -> None:
    with pytest.raises(BackendError, match="/proc"):
        judge({"shard_bytes": GIB, "peak_bytes": 0})


def test_a_rank_is_of_its_stage() -> None:
    target = BuildTarget("llama2-70b", tp=32, pp=8, stage=4)
    mesh = Mesh.build(256, target.rank, tp=32, pp=8)
    assert (mesh.pp.rank, mesh.tp.rank) == (4, 16)


@pytest.mark.parametrize(
    ("preset", "tp", "stage", "message"),
    [
        ("llama9", 32, None, "known: tiny"),
        ("llama2-70b", 24, None, "tp=24 does not divide"),
        ("llama2-70b", 32, 8, "use 0 to 7"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(preset: str, tp: int, stage: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench_materialize(preset=preset, tp=tp, pp=8, stage=stage, as_json=True)
