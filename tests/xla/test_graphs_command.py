"""`nxtrain graphs` on ranks of 4096: what it says of a sound run, and the defects that it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.errors import BackendError
from nxtrain.tools.trace.command import present
from tests.support import graph_mutants, leave_metadata
from tests.support.graph_mutants import MUTANTS, STEPS, traced
from tests.support.models import changed
from tests.support.parity import layout
from tests.support.processes import patient_s
from tests.support.xla_engine import run_devices
from tests.support.xla_processes import nxtrain

ROOT = Path(__file__).parents[2]
RANKS = [0, 1, 7, 8, 3001, 4095]
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
RATES = (0.0, 1e-3, 1.0, 0.1)  # the last is that of weight decay


SHAPE = [f"model.config.{key}={value}" for key, value in SMALL.items()] + ["train.seq_len=32"]


OF_RANKS = {"rank", "read a result", "read a buffer"}
"""Defects whose report names ranks."""

OUTSIDE = {"XLA_USE_BF16": "1"}
"""Variables of a shell that do not reach the process that traces."""


def run_graphs(world: int, ranks: list[int], *options: str, **shell: str) -> str:
    """Output of the command on the recipe, with Pythons of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "nxtrain", *command(world, ranks, *options)],
        env={**os.environ, **shell},
        capture_output=True,
        text=True,
        timeout=patient_s(400),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def command(world: int, ranks: list[int], *options: str) -> list[str]:
    argv = ["graphs", str(ROOT / "configs/llama2_7b_trn1.toml"), "--world", str(world)]
    argv += ["train.eval_every=1000", "data.validation_fraction=1e-5"]  # a run that evaluates has one graph more
    return [*argv, *(option for rank in ranks for option in ("--rank", str(rank))), *options]


def run_fork(folder: Path, argv: list[str], shell: Mapping[str, str]) -> str:
    """Output of the command, which is a fork, as its tracing process is."""
    done = nxtrain(*argv, env={**os.environ, **shell}, log=folder / "log.txt").ended(patient_s(400))
    assert done.code == 0, done.printed[-3000:]
    return done.printed


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The published 7B run on 4096 ranks in a small shape, as the command line reports it."""
    options = (*SHAPE, "--json", "--hlo", str(tmp_path_factory.mktemp("hlo")))
    result: dict[str, Any] = json.loads(run_graphs(4096, RANKS, *options, **OUTSIDE))
    return result


def census(graph: dict[str, Any]) -> dict[tuple[str, str], tuple[int, int, int]]:
    return {(r["op"], r["axis"]): (r["count"], r["num_groups"], r["group_size"]) for r in graph["collectives"]}


def test_all_ranks_and_steps_of_the_published_run_need_one_graph_for_each_purpose(sound: dict[str, Any]) -> None:
    assert (sound["world"], sound["rank"], sound["ranks"], sound["steps"]) == (4096, 0, RANKS, 3)
    names = [graph["name"] for graph in sound["graphs"]]
    assert set(names) - {"steady micro-batch", "steady update"} <= {"steady", "log", "vote", "evaluation"}
    assert names[-3:] == ["log", "vote", "evaluation"]
    assert sound["distinct_graphs"] == len({graph["hash"] for graph in sound["graphs"]}) == len(names)
    assert [graph["steps"] for graph in sound["graphs"]] == [*[[1, 2, 3]] * (len(names) - 2), [3], [3]]
    assert all(graph["ranks"] == RANKS for graph in sound["graphs"])


def test_its_collectives_span_the_axes_of_the_mesh_and_average_over_dp(sound: dict[str, Any]) -> None:
    assert (sound["problems"], sound["host_reads"]) == ([], [])
    assert {graph["dp_scale"] for graph in sound["graphs"]} == {1 / 512, None}
    assert not any(graph["f64"] for graph in sound["graphs"])
    for graph in sound["graphs"]:
        for (_, axis), (_, *groups) in census(graph).items():
            # tp/4: the ranks that share a K/V head
            assert groups == {"tp": [512, 8], "dp": [8, 512], "tp/4": [1024, 4]}[axis]


@pytest.mark.parametrize("blocks", [3, pytest.param(32, marks=pytest.mark.slow)])
def test_the_7b_at_its_true_width_needs_a_graph_per_micro_batch_and_one_to_update(blocks: int, tmp_path: Path) -> None:
    """On two ranks; all 32 blocks take a minute and 5 GiB."""
    options = (f"model.config.num_hidden_layers={blocks}", "--steps", "2", "--json")
    printed = run_fork(tmp_path, command(4096, [0, 3001], *options), OUTSIDE)
    result = json.loads(printed[printed.index("{") :])
    assert (result["problems"], result["host_reads"]) == ([], [])
    assert [(g["name"], g["steps"]) for g in result["graphs"]] == [
        ("steady micro-batch", [1, 2]),
        ("steady update", [1, 2]),
        ("log", [1, 2]),
        ("vote", [2]),
        ("evaluation", [2]),
    ]
    micro, update = map(census, result["graphs"][:2])
    # Both ways each: into the head and out of the embedding; into two column layers and out of two row layers of a
    # block. Backward gathers the inputs of the column layers again, for the gradients of their weights.
    entered = 2 + 4 * blocks
    assert micro["reduce-scatter", "tp"] == (entered, 512, 8)
    assert micro["all-gather", "tp"] == (entered + 2 * blocks, 512, 8)
    assert {axis for _, axis in micro} == {"tp"}
    assert {axis: groups for (_, axis), (_, *groups) in update.items()} == {"dp": [8, 512], "tp": [512, 8]}
    assert result["graphs"][1]["dp_scale"] == 1 / 512


def test_the_texts_of_its_graphs_are_saved(sound: dict[str, Any]) -> None:
    for graph in sound["graphs"]:
        text = Path(graph["hlo"]).read_text(encoding="utf-8")
        assert text.startswith("HloModule ")
        assert text.count(" all-gather(") == sum(r["count"] for r in graph["collectives"] if r["op"] == "all-gather")


def test_what_was_traced_in_place_of_the_vendors_layers_is_said(sound: dict[str, Any]) -> None:
    assert sound["replaced"] == {"backend.name": "neuron", "backend.layers": "nxd"}
    assert (sound["layers"], sound["attention"]) == ("native", "plain")
    name, layers, attention = sound["notes"]
    assert name.startswith("traced with backend.name=xla in place of neuron (")
    reason = "nxd on neuron where neuronx-distributed is installed; it is not here"
    assert layers == f"traced with backend.layers=native in place of nxd ({reason})"
    assert attention.startswith("backend.attention=auto is plain on trn1.32xlarge: train.seq_len=32 is not a multiple")


def test_a_run_of_automatic_choices_is_told_what_stands_for_them_in_whole_lines(tmp_path: Path) -> None:
    """NeuronX Distributed is installed, and fails as AWS's packages may where there is no device."""
    leave_metadata(tmp_path, "neuronx-distributed", "0.18.0")
    (tmp_path / "neuronx_distributed.py").write_text('raise OSError("no libnrt.so.1")\n', encoding="ascii")
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    flash = ["train.seq_len=2048", "model.config.max_position_embeddings=2048", "parallel.tp=2"]
    auto = ["backend.name=auto", "backend.layers=auto", "parallel.dp=2", "train.global_batch=2"]
    said = run_fork(tmp_path, command(4, [0], *SHAPE, *auto, *flash, "--steps", "1"), path).splitlines()
    layers = "neuronx-distributed cannot be imported here: OSError: no libnrt.so.1"
    assert f"traced with backend.layers=native in place of nxd (auto: {layers})" in said
    for line in (
        "traced with backend.name=xla in place of neuron (auto: neuron on a Trainium instance; ",
        "traced with backend.attention=plain in place of flash (auto: flash on trn1.32xlarge, by NKI's kernel of ",
    ):
        assert [other for other in said if other.startswith(line)]
    assert not [line for line in said if line.startswith("traced with the layers")]


def test_evaluation_is_one_graph_of_one_micro_batch_however_many_there_are(tmp_path: Path) -> None:
    """Unrolled, the graph would grow with accumulation: on one machine the published batch is 256 micro-batches."""
    small = layout("gqa2", tp=8, dp=512, sp=True)
    plans = [
        changed(small, train={"global_batch": 512 * number, "micro_batch": 1, "eval_every": 1, "eval_batches": 2})
        for number in (2, 3)
    ]
    (result,) = run_devices(1, traced, 4096, [(plan, "", [0]) for plan in plans], folder=tmp_path)
    two, three = ([graph for graph in item["graphs"] if graph["name"] == "evaluation"] for item in result)
    assert two == three
    assert len(two) == 1
    assert not [problem for item in result for problem in item["problems"]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Sound runs, by learning rate, and mutants: on ranks 0 and 1 where a defect is of a rank, else on rank 0."""
    small = layout("gqa2", tp=8, dp=512, sp=True)
    plan = changed(small, train={"global_batch": 1024, "micro_batch": 1}, optim={"warmup_steps": 0})
    flat = [changed(plan, optim={"lr": lr, "min_lr": lr, "weight_decay": 0.1}) for lr in RATES]
    rising = changed(plan, optim={"lr": 1.0, "warmup_steps": 2})  # 0.5, then 1.0, which is a constant as a number
    cases = [(run, "", [0]) for run in flat]
    cases += [(rising, mutant, [0, 1] if mutant in OF_RANKS else [0]) for mutant in MUTANTS if mutant]
    (result,) = run_devices(1, traced, 4096, cases, folder=tmp_path_factory.mktemp("mutants"))
    return dict(zip([*map(str, RATES), *filter(None, MUTANTS)], result, strict=True))


def test_no_learning_rate_and_no_storage_changes_a_graph(reports: dict[str, dict[str, Any]]) -> None:
    hashes = [[graph["hash"] for graph in reports[name]["graphs"]] for name in (*map(str, RATES), "uploaded")]
    assert all(one == other for one, other in pairwise(hashes))
    assert all(reports[name]["problems"] == [] for name in (*map(str, RATES), "uploaded"))


@pytest.mark.parametrize(
    ("mutant", "words"),
    [
        ("rank", "ranks 1 record other graphs than rank 0"),
        ("lr", "compiled again in step 2: 2 graphs where one is enough"),
        ("everyone", "all-reduce over 1 groups of 4096 ranks, which are not an axis of this mesh; its axes: tp of 8"),
        ("own group", "reduce-scatter over 1 groups of 8 ranks, which are not an axis"),
        ("world", "sums over dp are multiplied by 0.000244141; the mean of 512 ranks needs 0.00195312"),
        ("f64", "computes in float64"),
    ],
)
def test_a_defect_is_refused(mutant: str, words: str, reports: dict[str, dict[str, Any]]) -> None:
    assert any(words in problem for problem in reports[mutant]["problems"]), reports[mutant]["problems"]
    with pytest.raises(BackendError) as raised:
        present({**reports[mutant], "notes": []}, as_json=False)
    assert raised.value.exit_code == 5


@pytest.mark.parametrize(
    ("mutant", "function"), [("read a result", "_read_result"), ("read a buffer", "_step")], ids=["result", "buffer"]
)
def test_a_read_inside_a_step_is_refused_with_its_place(
    mutant: str, function: str, reports: dict[str, dict[str, Any]]
) -> None:
    lines = Path(graph_mutants.__file__).read_text(encoding="utf-8").splitlines()
    reads = reports[mutant]["host_reads"]
    assert [(read["rank"], read["step"]) for read in reads if read["function"] == function] == [
        (rank, step) for rank in (0, 1) for step in range(1, STEPS + 1)
    ]
    for read in reads:
        assert Path(read["file"]).name == "graph_mutants.py"
        assert lines[read["line"] - 1].endswith("# the line that the report names")
    assert f"graph_mutants.py:{reads[0]['line']}: {function} reads a value" in reports[mutant]["problems"][0]
