"""Efficiency over two independent runs of the same round."""

from __future__ import annotations

import pytest

from nxtrain.common.errors import ConfigError
from nxtrain.common.mesh import Mesh
from nxtrain.config.schema import RunConfig
from nxtrain.tools.bench.scaling import LAYOUTS, ONE, RANKS, TWO, bench_scaling, summarize
from nxtrain.tools.bench.train import workload


def of(*seconds: float, waited: float = 0.0) -> list[dict[str, float]]:
    return [{"wall": one, "cpu": one / 2, "waited": waited * one} for one in seconds]


def test_a_slow_round_changes_no_ratio_and_the_slower_rank_counts() -> None:
    measured = {
        ONE: [of(1.0), of(10.0)],
        TWO: [of(1.0, 2.0), of(10.0, 20.0)],
        "tp2": [of(1.0, 2.0, waited=0.25), of(10.0, 20.0)],
    }
    result = summarize(measured, tokens=100)
    assert [row["rounds"] for row in result["rows"]] == [[100.0, 10.0], [150.0, 15.0], [100.0, 10.0]]
    assert result["ratios"] == {"tp2": pytest.approx(2 / 3)}
    assert result["over_one"] == {TWO: 1.5, "tp2": 1.0}
    assert result["cpu_ratios"] == {"tp2": 1.0}
    assert result["rows"][2]["waited"] == 0.125


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_is_one_of_two_ranks(name: str) -> None:
    config = RunConfig.model_validate({"parallel": LAYOUTS[name]}).parallel
    mesh = Mesh.build(RANKS, 0, tp=config.tp, pp=config.pp)
    assert {"tp2": mesh.tp_size, "pp2": mesh.pp_size}.get(name, mesh.dp.size) == RANKS
    assert config.shard == ("zero1" if name == "zero1" else "none")


def test_an_unknown_layout_is_refused() -> None:
    work = workload(steps=1, batch=1, seq_len=8, precision="fp32", preset="tiny")
    with pytest.raises(ConfigError, match=r"no layout 'tp4'.*\n.*tp2, dp2"):
        bench_scaling(work=work, layouts=["tp4"], rounds=1, as_json=True)
