"""Benchmarks as commands: their figures, their JSON and their targets."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.distributed.c10d_collectives import WAIT_CLOCK
from nxtrain.common.errors import BackendError
from nxtrain.common.family import find_family
from nxtrain.tools.bench import checkpoint, data, data_wait, materialize, optim, training
from nxtrain.tools.bench.breakdown import COMMUNICATION, KINDS, OUTSIDE, UPDATE, break_down
from nxtrain.tools.bench.checkpoint import COPY, DISK_READ, DISK_WRITE, FLOORS, LOAD, SAVE, STALL, FilledState
from nxtrain.tools.bench.clocks import Clocks
from nxtrain.tools.bench.collectives import GIB, KIB, OPERATIONS
from nxtrain.tools.bench.scaling import ONE, TWO
from nxtrain.tools.bench.train import SHAPE, Workload
from nxtrain.tools.bench.training import transformers_step
from tests.support.commands import command as forked_command
from tests.support.commands import outcome
from tests.support.processes import patient_s

SMALL = {**SHAPE, "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3}
BATCH, SEQ_LEN = 2, 64
SHORT_LADDER = (1.0, 0.25, 0.0625)


def command(*argv: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "nxtrain", "bench", *argv, "--json"],
        capture_output=True,
        text=True,
        timeout=patient_s(280),
        check=False,
    )
    of_others = [line for line in done.stderr.splitlines() if " so far" not in line]
    assert (done.returncode, of_others) == (0, []), "a library prints lines of its own"
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def flops(shape: dict[str, int], tokens: int, seq_len: int) -> tuple[int, int]:
    """Of forward and backward: the products with weights, and those of causal attention, each token with half."""
    dim, layers = shape["hidden_size"], shape["num_hidden_layers"]
    kv = dim * shape["num_key_value_heads"] // shape["num_attention_heads"]
    weights = layers * (2 * dim * dim + 2 * dim * kv + 3 * dim * shape["intermediate_size"]) + dim * shape["vocab_size"]
    return 6 * weights * tokens, 6 * layers * dim * seq_len * tokens


def counted(turn: Any) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        turn()
    return {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_sides_of_bench_train_compute_the_products_that_the_formula_counts(precision: str) -> None:
    work = Workload(1, BATCH, SEQ_LEN, precision, {**SMALL, "max_position_embeddings": SEQ_LEN})
    products, attention = flops(SMALL, BATCH * SEQ_LEN, SEQ_LEN)
    step, _ = training.ours(work, CpuBackend())
    ours, peer = (
        counted(step),
        counted(transformers_step(work, Clocks(torch.device("cpu")), fused=True, compiled=False)),
    )
    # Without instructions for bf16, long products are sums of float32 products.
    assert ours["aten.mm"] + ours.get("aten.addmm", 0) == peer["aten.mm"] == products
    # A short sequence is one block, which is computed whole.
    assert ours["aten.bmm"] == 2 * attention
    family = find_family("llama")
    formula = family.dimensions(family.config_type.model_validate(work.shape)).flops_per_token(SEQ_LEN)
    assert formula * BATCH * SEQ_LEN == products + attention


SIZE = ("--preset", "tiny", "--threads", "1", "--rounds", "2", "--steps", "1", "--batch", "2", "--seq-len", "64")
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 192, "vocab_size": 512}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def test_bench_train_measures_every_candidate_by_two_clocks_and_in_units_of_the_peak(tmp_path: Path) -> None:
    names = ["nxtrain", "transformers_default", "transformers"]
    chart = tmp_path / "ratios.svg"
    result = command("train", *SIZE, "--candidates", ",".join(names), "--chart", str(chart))
    products, attention = flops({**TINY, **HEADS}, tokens=1, seq_len=64)
    assert result["flops_per_token"] == products + attention
    *rows, peak = result["rows"]
    assert [row["name"] for row in rows] == names
    assert peak == {"name": "gemm", "value": result["peak_flops"], "unit": "FLOP/s", "rounds": peak["rounds"]}
    assert result["clock"] == "cpu"
    for row in rows:
        assert row["rounds"] == row["by_clock"]["cpu"]["rounds"]
        assert row["value"] == pytest.approx(sum(row["rounds"]) / 2)
        assert all(len(clock["rounds"]) == 2 and min(clock["rounds"]) > 0 for clock in row["by_clock"].values())
        assert row["mfu"] == pytest.approx(
            sum(rate * (products + attention) / one for rate, one in zip(row["rounds"], peak["rounds"], strict=True))
            / 2
        )
        assert row["loss"] == pytest.approx(math.log(TINY["vocab_size"]), abs=0.4)
        assert result[row["name"]] == {"tokens_per_s": row["value"], "mfu": row["mfu"]}
    assert set(result["ratios"]) == {"transformers_default", "transformers"}
    assert result["ratio"] == result["ratios"]["transformers"]
    assert result["ratios_of"]["nxtrain"]["transformers"]["rounds"] == pytest.approx(
        [ours / peer for ours, peer in zip(rows[0]["rounds"], rows[2]["rounds"], strict=True)]
    )
    assert len(ET.fromstring(chart.read_text(encoding="utf-8")).findall("{*}line")) == 3  # two ranges, and equality
    parts = result["breakdown"]["nxtrain"]
    assert set(parts["kinds"]) == set(KINDS)
    assert parts["sum_s"] == pytest.approx(parts["step_s"], rel=0.05)


def test_the_parts_of_a_step_add_up_to_it_and_hide_nothing() -> None:
    """Time outside of operations is a kind: a step that also sleeps has that much more of it."""
    backend, slept_s = CpuBackend(), 0.2
    work = Workload(1, BATCH, SEQ_LEN, "bf16", {**SMALL, "max_position_embeddings": SEQ_LEN})
    step, state = training.ours(work, backend)
    step()

    def slow_step() -> Tensor:
        time.sleep(slept_s)
        return step()

    result = training.parts(slow_step, state, backend)()
    kinds = result["kinds"]
    assert sum(kind["s"] for kind in kinds.values()) == pytest.approx(result["step_s"], rel=0.05)
    assert kinds[OUTSIDE]["s"] > slept_s
    assert kinds["attention"]["calls"] > 0
    # Forward and both gradients of each projection and of the output, the latter in one piece.
    assert kinds["matrix products"]["calls"] >= 3 * (4 * SMALL["num_hidden_layers"] + 1)
    assert kinds["optimizer"]["calls"] > 15
    assert kinds["communication"]["s"] == kinds["waiting"]["s"] == 0
    assert "step" not in vars(state.optimizer)  # the marks are gone


def test_waiting_for_other_ranks_is_a_kind_wherever_it_happens() -> None:
    waited_s = 0.2

    def step() -> None:
        with record_function(UPDATE), WAIT_CLOCK:
            time.sleep(waited_s)

    with training.waits_marked():
        kinds = break_down(step)["kinds"]
    assert kinds["waiting"]["s"] > 0.99 * waited_s
    assert kinds["optimizer"]["s"] < 0.5 * waited_s
    assert WAIT_CLOCK.note is None  # the marks are gone


def test_peers_get_our_allocator_settings_unless_these_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(training, "keep_heap", lambda: calls.append("kept"))
    work = Workload(1, 1, 8, "fp32", {**SMALL, "max_position_embeddings": 8})
    for name in ("transformers", "gemm"):
        training.turns(name, asdict(work))
    assert calls == ["kept", "kept"]
    training.turns("transformers", asdict(replace(work, stock_allocator=True)))
    assert calls == ["kept", "kept"]


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write; views move none."""

    num_bytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            flat = torch.utils._pytree.tree_leaves((args, kwargs, result))
            self.num_bytes += sum(x.nbytes for x in flat if isinstance(x, Tensor))
        return result


def traffic(turn: Any) -> int:
    turn()  # the first makes what later ones reuse
    mode = Traffic()
    with mode:
        turn()
    return mode.num_bytes


TRAFFIC = {
    "fp32": 16.1,
    "fp32_master": 24.1,
    "bf16_stochastic": 84.5,
    "bf16_stochastic, bf16 state": 220.5,
    "bf16_kahan": 62.1,
    "bf16_kahan, bf16 state": 90.1,
}
"""Bytes per parameter that the operations of an update read and write, rounded up. One pass more over a bf16 tensor is
4 of them. A rule that comes to move less gets its new number."""


@pytest.mark.parametrize("case", optim.CASES, ids=lambda case: case.name)
def test_an_update_moves_no_more_memory_than_it_did(case: optim.Case) -> None:
    backend = CpuBackend()
    layout = optim.layout_of(backend, 1)
    grads = {name: torch.randn(spec.shape) * 1e-3 for name, spec in layout.table.items()}
    update, _ = optim._ours(case, layout, backend, grads)
    per_param = traffic(update) / layout.table.num_params()
    assert 0.95 * TRAFFIC[case.name] < per_param <= TRAFFIC[case.name]


def _of_small_models() -> None:
    vars(optim)["SHAPE"] = SMALL


def assert_has_shared_keys(result: Mapping[str, Any], expected: Mapping[str, float], rounds: int) -> None:
    """Scripts read the machine, rows and ratios of every benchmark that compares implementations."""
    assert result["machine"]["cores"] > 0
    assert {row["name"]: row["value"] for row in result["rows"]} == pytest.approx(expected)
    assert all(row["unit"] and len(row["rounds"]) == rounds for row in result["rows"])
    assert set(result["ratios"]) <= set(expected)


def test_bench_optim_measures_every_rule_and_counts_its_bytes(tmp_path: Path) -> None:
    """A small model has the same types, and so the same bytes per parameter."""
    argv = ("bench", "optim", "--layers", "1", "--rounds", "1", "--json")
    code, output = forked_command(tmp_path, *argv, first=_of_small_models)
    assert code == 0, output
    result = json.loads(output)  # a library prints no line of its own
    assert result["num_params"] < 1_000_000
    rules = result["rules"]
    assert_has_shared_keys(result, {name: rule["ns_per_param"] for name, rule in rules.items()}, rounds=1)
    assert result["ratios"] == {name: rule["ratio"] for name, rule in rules.items()}
    assert all(rule["ns_per_param"] > 0 and rule["ratio"] > 0 for rule in rules.values())
    assert {name: round(rule["bytes_per_param"]) for name, rule in rules.items()} == {
        "torch.optim.AdamW(fused=True)": 12,
        "fp32": 12,
        "fp32_master": 14,
        "bf16_stochastic": 10,
        "bf16_stochastic, bf16 state": 6,
        "bf16_kahan": 12,
        "bf16_kahan, bf16 state": 8,
    }


def test_bench_optim_measures_muon_with_one_running_mean(tmp_path: Path) -> None:
    argv = ("bench", "optim", "--name", "muon", "--layers", "1", "--rounds", "1", "--json")
    code, printed = forked_command(tmp_path, *argv, first=_of_small_models)
    assert code == 0, printed
    rules = json.loads(printed)["rules"]
    assert all(rule["ns_per_param"] > 0 and rule["ratio"] > 0 for rule in rules.values())
    assert set(rules) == {optim.MUON_PEER, *(case.name for case in optim.CASES), "fp32, bf16 products"}
    matrices = 3.0 - rules["fp32"]["bytes_per_param"] / 4.0  # share of the parameters without a second mean
    assert 0.1 < matrices < 0.9
    for name, of_adamw, mean in (
        ("fp32_master", 14, 4),
        ("bf16_stochastic, bf16 state", 6, 2),
        (optim.MUON_PEER, 12, 4),
    ):
        assert rules[name]["bytes_per_param"] == pytest.approx(of_adamw - mean * matrices, abs=0.01)


def test_collectives_are_measured_at_every_size() -> None:
    result = command("collectives", "--sizes-kib", "4,256", "--rounds", "1")
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [f"{op}/{kib}" for op in OPERATIONS for kib in (4, 256)]
    for row in rows.values():
        assert row["value"] == pytest.approx(row["kib"] * KIB / GIB / row["wall_s"])
        assert row["cpu_s"] > 0
    assert set(result["latency_s"]) == set(OPERATIONS)
    for op in set(OPERATIONS) - {"copy"}:
        assert result["ratios"][f"{op}/4"] == pytest.approx(rows[f"{op}/4"]["value"] / rows["copy/4"]["value"])


def test_two_ranks_run_in_turn_with_two_independent_runs(tmp_path: Path) -> None:
    chart = tmp_path / "efficiency.svg"
    size = ("--rounds", "1", "--steps", "1", "--batch", "2", "--seq-len", "32")
    result = command("scaling", "--preset", "tiny", "--layouts", "pp2", *size, "--chart", str(chart))
    rows = {row["name"]: row for row in result["rows"]}
    assert list(rows) == [ONE, TWO, "pp2"]
    assert set(result["ratios"]) == set(result["cpu_ratios"]) == set(result["breakdown"]) == {"pp2"}
    assert result["ratios"]["pp2"] == pytest.approx(rows["pp2"]["value"] / rows[TWO]["value"])
    assert result["over_one"]["pp2"] == pytest.approx(rows["pp2"]["value"] / rows[ONE]["value"])
    cpu = (rows[one]["cpu_s_per_token"]["value"] for one in (TWO, "pp2"))
    assert result["cpu_ratios"]["pp2"] == pytest.approx(next(cpu) / next(cpu))
    assert 0 < rows["pp2"]["waited"] < 1
    parts = result["breakdown"]["pp2"]
    assert parts["sum_s"] == pytest.approx(parts["step_s"], rel=0.05)
    assert parts["kinds"][COMMUNICATION]["calls"] > 0
    assert rows[TWO]["waited"] == 0
    texts = [text.text for text in ET.fromstring(chart.read_text(encoding="utf-8")).findall("{*}text")]
    assert texts[2:] == ["pp2", f"{result['ratios']['pp2']:.2f}"]


def _of_short_waits() -> None:
    vars(data)["TRAINED_CHARS"] = 1 << 18
    vars(data_wait)["LADDER"] = SHORT_LADDER
    data_wait.share_waiting.__kwdefaults__ = {"steps": 20}


def test_the_loader_is_measured_beside_numpy(tmp_path: Path) -> None:
    """The memory of a start is that of a Python that has imported nothing else."""
    sizes = ("--mib", "2", "--seq-len", "128", "--text-mib", "1", "--file-mib", "256", "--rounds", "1")
    code, output = forked_command(tmp_path, "bench", "data", *sizes, "--json", first=_of_short_waits, within_s=250.0)
    assert code == 0, output
    result = json.loads(output[output.index("{\n") :])
    ids = {row["name"]: row["value"] for row in result["rows"]}
    loader = ids.pop("loader")
    assert list(ids) == ["numpy"]
    assert min(loader, *ids.values()) > 0
    assert result["ratios"] == {name: pytest.approx(loader / value) for name, value in ids.items()}
    text = {row["name"]: row for row in result["text"]["rows"]}
    assert list(text) == ["concat", "best_fit", "best_fit in a worker"]
    assert result["text"]["ratios"].keys() == result["text"]["inside"].keys() == text.keys()
    assert all(0 < inside < 1 for inside in result["text"]["inside"].values())
    for name, row in text.items():  # sums of times follow the machine's speed, and are near
        assert 0.5 < result["text"]["ratios"][name] / (row["value"] / row["bare"][0]) < 2
    wait = result["wait"]
    assert (wait["tokens_per_s"], set(wait["shares"])) == (1_000_000, {"text", "ids"})
    # Cores that tokenize half a million tokens a second each keep 1 million waiting; ids are packed much faster.
    assert 0 <= wait["shares"]["ids"] < wait["shares"]["text"] < 1
    rates = {0.0, *(part * wait["tokens_per_s"] for part in SHORT_LADDER)}  # which of them depends on the load
    assert all(set(kept.values()) <= rates and "1" in kept for kept in wait["kept"].values())
    # A start that reads the documents would take their memory: the file is larger than the limit.
    assert result["start"]["mib"] >= 256
    assert result["start"]["rss_mib"] < 200


def test_a_checkpoint_is_measured_beside_the_disk_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[int] = []
    save = FilledState.save

    def saved(state: FilledState) -> None:
        save(state)
        files = (file for file in tmp_path.rglob("step-*/**/*") if file.is_file())
        written.append(sum(file.stat().st_size for file in files))

    monkeypatch.setattr(FilledState, "save", saved)
    code, out, err = outcome("bench", "checkpoint", "--mib", 31, "--folder", tmp_path, "--rounds", 1, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["mib"] == 24, "two tensors of each kind"
    assert [size >> 20 for size in written] == [24, 24]
    results = result["results"]
    assert_has_shared_keys(result, {name: row["gib_per_s"] for name, row in results.items()}, rounds=1)
    assert set(results) == {COPY, STALL, DISK_WRITE, DISK_READ, *FLOORS}
    for name, row in results.items():
        floor = results[FLOORS.get(name, name)]["gib_per_s"]
        assert row["share"] == pytest.approx(row["gib_per_s"] / floor)
        assert row["gib_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("slow", "code"), [(SAVE, 1), (LOAD, 1), ("", 0)])
def test_the_check_fails_below_a_target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow: str, code: int) -> None:
    names = {COPY, STALL, DISK_WRITE, DISK_READ, *FLOORS}
    seconds = {name: [2.0 if name == slow else 1.0] for name in names}
    monkeypatch.setattr(checkpoint, "measure", lambda *_: seconds)
    ended, out, err = outcome("bench", "checkpoint", "--folder", tmp_path, "--check", "--json")
    assert ended == code, err
    assert list(json.loads(out)["missed"]) == ([slow] if slow else [])


MIB = 1 << 20
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc, which only Linux has")


@on_linux
@pytest.mark.parametrize(
    ("preset", "num_params", "blocks", "shard_params"),
    [
        # By hand, of a block: q and o, k and v of which four ranks hold each head, gate and up and down, two norms.
        (
            "llama2-70b",
            68_976_648_192,
            [40, 49],
            10 * ((2 * 8192**2 + 4 * 2 * 1024 * 8192 + 3 * 8192 * 28_672) // 32 + 2 * 8192),
        ),
        pytest.param(
            "llama3.1-405b",
            405_853_388_800,
            [63, 78],  # 126 blocks: 15 to the last stage, which projects to scores, and to the first
            16 * ((2 * 16_384**2 + 4 * 2 * 1024 * 16_384 + 3 * 16_384 * 53_248) // 32 + 2 * 16_384),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_shard_of_tp_32_and_pp_8_is_made_in_bounded_memory(
    preset: str, num_params: int, blocks: list[int], shard_params: int
) -> None:
    """The bound counts the interpreter and torch; what is added must be the shard and little else."""
    argv = [sys.executable, "-m", "nxtrain", "bench", "materialize", "--preset", preset, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=patient_s(280), check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["tp"], result["pp"], result["stage"]) == (32, 8, 4)
    assert (result["num_params"], result["blocks"]) == (num_params, blocks)
    assert result["shard_params"] == shard_params
    assert result["shard_bytes"] == 2 * shard_params
    assert result["peak_bytes"] <= result["bound_bytes"] == int(1.3 * result["shard_bytes"]) + (1 << 30)
    assert result["within"] is True
    added = result["peak_bytes"] - result["before_bytes"]
    assert 0.95 * result["shard_bytes"] < added < result["shard_bytes"] + 64 * MIB


@on_linux
def test_a_peak_over_the_bound_is_printed_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(materialize, "SLACK_BYTES", 0)  # torch alone takes more
    with pytest.raises(BackendError, match="exceeds"):
        materialize.bench_materialize(preset="tiny", tp=2, pp=2, stage=0, as_json=True)
    assert json.loads(capsys.readouterr().out)["within"] is False
