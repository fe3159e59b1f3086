"""The areas of a run's time: drawn records, shares that add up, and the rest of a divided step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxtrain.common.run_folder import ENVIRONMENT_FILE
from nxtrain.metrics.status import KINDS_S, SECTIONS_S
from nxtrain.tools.report.figures import PARTS, breakdown, judge
from nxtrain.tools.report.run import read_run
from tests.support.run_folders import record, write_run

TIMES = st.fixed_dictionaries({key: st.integers(0, 50) for key in (*KINDS_S, *SECTIONS_S)})


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TIMES, min_size=1, max_size=5), st.booleans())
def test_shares_are_those_of_the_sums(tmp_path: Path, drawn: list[dict[str, int]], divided: bool) -> None:
    records = []
    for step, times in enumerate(drawn, 1):
        sections = {key: times[key] for key in SECTIONS_S} if divided else {}
        whole = {key: times[key] for key in KINDS_S} | {"training_s": times["training_s"] + sum(sections.values())}
        records.append(record(step, **whole, **sections))
    sums = {key: sum(each.get(key, 0) for each in records) for key in PARTS}
    sums["training_s"] -= sum(sums[key] for key in SECTIONS_S)
    total = sum(sums.values())
    found = breakdown(read_run(write_run(tmp_path, records=records)))
    if not total:
        assert found is None
        return
    assert found is not None
    names = {**PARTS, **({"training_s": "rest of the steps"} if divided else {})}
    expected = {names[key]: value / total for key, value in sums.items() if value}
    assert {name: share for _, name, _, share in found["areas"]} == pytest.approx(expected)
    assert len({color for color, *_ in found["areas"]}) == len(found["areas"])


@pytest.mark.parametrize(
    ("instance", "tokens", "limit"), [("trn1.32xlarge", 64, "memory-bound"), ("trn1.32xlarge", 4096, "compute-bound")]
)
def test_a_known_machine_decides_between_memory_and_arithmetic(
    tmp_path: Path, instance: str, tokens: int, limit: str
) -> None:
    """A NeuronCore of trn1 does 232 operations for each byte that it reads, and fp32 weights have four bytes."""
    train = {"steps": 60, "global_batch": 16, "seq_len": tokens, "micro_batch": 1}
    cluster = {"instance": instance, "nodes": 1}
    found = judge(read_run(write_run(tmp_path, records=[record(1)], cluster=cluster, train=train)))
    assert found.startswith(f"{limit}: ")


def test_a_gpu_whose_host_never_waits_is_launch_bound(tmp_path: Path) -> None:
    times = {"data_s": 0.0, "training_s": 0.97, "log_s": 0.03}
    folder = write_run(tmp_path, records=[record(step, **times) for step in (1, 2)], environment={"asynchronous": True})
    assert judge(read_run(folder)).startswith("launch-bound: the host issues work for 97%")
    (folder / ENVIRONMENT_FILE).write_text(json.dumps({"asynchronous": False}), encoding="utf-8")
    assert judge(read_run(folder)).startswith("bound by its steps: ")
