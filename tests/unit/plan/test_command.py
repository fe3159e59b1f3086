"""The command `nxtrain plan`: its JSON, its time without torch, refusals, and searches."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nxtrain.cli.main import app
from nxtrain.common.errors import ConfigError
from nxtrain.common.family import family_names, find_family
from nxtrain.plan.predict import INTERRUPTIONS_PER_CHIP_S
from nxtrain.plan.presets import DATASETS
from tests.support.generated_docs import shapes

SEVEN = "configs/llama2_7b_trn1.toml"
SEVENTY = "configs/llama2_70b_trn1.toml"
CONTRACT = {
    "fits",
    "reasons",
    "hbm_bytes",
    "bytes",
    "step_time_s",
    "tokens_per_s",
    "sequences_per_s",
    "mfu",
    "checkpoint_bytes",
    "cost_usd",
    "days",
}
KINDS = {"params", "grads", "optimizer", "activations", "logits", "total"}
MAX_MODULES = 500


def answer(*argv: str) -> Any:
    result = CliRunner().invoke(app, ["plan", *argv, "--json"])
    if result.exception is not None:
        raise result.exception
    return json.loads(result.output)


def test_the_contract_of_json_is_kept_and_its_numbers_agree() -> None:
    result = answer(SEVEN)
    assert result.keys() >= CONTRACT
    assert result["bytes"].keys() >= KINDS
    assert sum(result["bytes"].values()) == 2 * result["bytes"]["total"]
    assert (result["fits"], result["reasons"], result["hbm_bytes"]) == (True, [], 16 << 30)
    assert result["tokens_per_s"] == pytest.approx(4096 * result["sequences_per_s"])
    assert result["sequences_per_s"] == pytest.approx(1024 / result["step_time_s"])
    assert result["days"] == pytest.approx(500_000 * result["step_time_s"] / 86_400)
    assert result["cost_usd"] == pytest.approx(result["days"] * 24 * 128 * 21.5)
    flops = result["flops_per_token"] * result["tokens_per_s"]
    assert result["mfu"] == pytest.approx(flops / (128 * 32 * 95e12))
    assert result["parallel"]["dp"] == 512


COUNTED = """
import sys
from nxtrain.__main__ import main
sys.argv[1:] = {argv!r}
calls = 0
def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count)
try:
    main()
except SystemExit as end:
    sys.setprofile(None)
    print(end.code or 0, calls, len(sys.modules), *(name for name in sys.modules if name == "torch"), file=sys.stderr)
"""
"""Program that prints a command's exit code, its calls of functions, and its modules; no clock is read."""


@pytest.mark.parametrize(
    ("argv", "max_calls"),
    [((SEVEN,), 750_000), ((SEVENTY, "--search", "--instance", "p5", "--nodes", "32"), 4_500_000)],
)
def test_a_plan_makes_few_calls_and_imports_no_torch(argv: tuple[str, ...], max_calls: int) -> None:
    """A process makes some ten million such calls in a second; 0.55 and 3.5 million are made here."""
    code = COUNTED.format(argv=["plan", *argv, "--json"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert json.loads(done.stdout)
    code, calls, modules, *torch = done.stderr.split()
    assert (code, torch) == ("0", [])
    assert int(calls) < max_calls
    assert int(modules) < MAX_MODULES


def test_a_search_has_every_layout_once_fastest_first_with_reasons_for_the_others() -> None:
    result = answer(SEVENTY, "--search")
    speeds = [layout["tokens_per_s"] for layout in result["layouts"]]
    assert speeds == sorted(speeds, reverse=True)
    assert all(layout["fits"] and layout["bytes"]["total"] <= layout["hbm_bytes"] for layout in result["layouts"])
    every = [item["parallel"] for item in (*result["layouts"], *result["rejected"])]
    degrees = [(layout["tp"], layout["pp"], layout["dp"], layout["shard"]) for layout in every]
    assert len(set(degrees)) == len(degrees)
    assert all(tp * pp * dp == 256 * 32 for tp, pp, dp, _ in degrees)
    assert all(layout["reason"] for layout in result["rejected"])
    assert {layout["reason"].split()[0] for layout in result["rejected"]} >= {"a", "1024"}


def test_a_layout_of_a_search_is_what_a_plan_of_it_predicts() -> None:
    best = answer(SEVENTY, "--search")["layouts"][0]
    changes = [f"{'parallel' if key in PARALLEL else 'train'}.{key}={value}" for key, value in best["parallel"].items()]
    one = answer(SEVENTY, *(change.replace("True", "true") for change in changes))
    assert {key: one[key] for key in CONTRACT} == {key: best[key] for key in CONTRACT}


PARALLEL = ("tp", "cp", "cp_method", "pp", "dp", "ep", "virtual_pp", "schedule", "sequence_parallel", "shard")


def test_what_does_not_fit_is_reported_with_the_arithmetic() -> None:
    actual = answer(SEVENTY, "parallel.pp=1", "parallel.dp=256")
    assert not actual["fits"]
    assert f"needs {actual['bytes']['total'] / (1 << 30):.2f} GiB" in actual["reasons"][0]
    result = CliRunner().invoke(app, ["plan", SEVENTY, "parallel.pp=1", "parallel.dp=256"])
    assert (result.exit_code, "does not fit:" in result.output) == (0, True)


def test_missing_prices_give_no_cost_and_the_reason() -> None:
    argv = (SEVEN, "--instance", "trn2.48xl", "--nodes", "8", "parallel.dp=0")
    result = answer(*argv)
    assert result["cost_usd"] is None
    assert "no price is recorded" in result["cost_note"]
    priced = answer(*argv, "--price", "10")
    assert priced["cost_usd"] == pytest.approx(priced["days"] * 24 * 8 * 10)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((SEVEN, "--instance", "trn1.32xlrge"), "did you mean trn1.32xl"),
        ((SEVEN, "parallel.tp=3", "parallel.dp=0"), "does not divide"),
        ((SEVEN, "--model", "bloom-176b", "parallel.tp=32", "parallel.dp=0"), "use 1, 2, 4, 7, 8, 14, 16, 28, 56, 112"),
        ((SEVEN, "--instance", "x" * 999), "... (1,001 characters) is not an instance"),
        ((SEVEN, "--nodes", "4"), "tp=8 x pp=1 x dp=512 = 4096 ranks, but the world has 128"),
        ((SEVENTY, "parallel.pp=96", "parallel.dp=0"), "96"),
        ((SEVEN, "--dataset", "slimpyjama"), "did you mean slimpajama"),
        ((SEVEN, "--dataset", "c4", "--tokens", "1e9"), "use one"),
        ((SEVEN, "--model", "gpt3-175"), "did you mean gpt3-175b"),
        ((SEVEN, "--hardware", "absent.toml"), "No such file"),
        ((SEVEN, "train.stepz=1"), "unknown key"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        answer(*argv)
    assert (caught.value.exit_code, words in str(caught.value)) == (2, True), str(caught.value)


RATES = ("device_flops", "memory_bytes_s", "link_bytes_s", "network_bytes_s")
CELLS = "".join(f"{name} = 1e12\n" for name in ("device_bytes", *RATES, "host_bytes"))


@pytest.mark.parametrize("cell", RATES)
def test_the_least_number_of_a_cell_gives_numbers_that_any_reader_of_json_knows(cell: str, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    for value in ("1e-6", "1e-7", "5e-324"):
        cells = CELLS.replace(f"{cell} = 1e12", f"{cell} = {value}")
        file.write_text(f"[box]\n{cells}devices = 4\nhost_threads = 8\n", encoding="ascii")
        own = ("--hardware", str(file), "--instance", "box", "--nodes", "2", "parallel.tp=2", "parallel.dp=0")
        result = CliRunner().invoke(app, ["plan", SEVEN, *own, "--tokens", "1e18", "--price", "1e9", "--json"])
        if value == "1e-6":
            assert json.loads(result.output, parse_constant=pytest.fail)["days"] > 0
        else:
            assert isinstance(result.exception, ConfigError)


def test_a_file_of_machines_of_which_none_is_meant_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(f"[box]\n{CELLS}devices = 1\nhost_threads = 8\n", encoding="ascii")
    with pytest.raises(ConfigError, match=r"name a machine by --instance: box"):
        answer(SEVEN, "--hardware", str(file))
    assert answer(SEVEN, "--hardware", str(file), "--instance", "trn1.32xl")["instance"] == "trn1.32xlarge"


def test_a_table_for_people_has_the_same_numbers() -> None:
    result = answer(SEVEN)
    output = CliRunner().invoke(app, ["plan", SEVEN]).output
    assert f"{result['tokens_per_s']:,.0f} tokens/s" in output
    assert f"{result['cost_usd']:,.0f} USD" in output
    assert "tp traffic" in output
    searched = CliRunner().invoke(app, ["plan", SEVENTY, "--search", "--top", "2"]).output
    assert "slower layouts" in searched
    assert "more rejected" in searched


def test_layouts_that_differ_in_experts_alone_are_told_apart() -> None:
    argv = ["plan", "configs/qwen3_moe_tiny_cpu.toml", "--instance", "p5", "--search", "--top", "1000"]
    output = CliRunner().invoke(app, argv).output
    assert re.search(r"^ *method +tp +cp +pp +dp +ep +shard", output, re.MULTILINE)
    rows = re.findall(r"^ *full +((?:\d+ +){5}\w+) ", output, re.MULTILINE)
    assert {row.split()[4] for row in rows} == {"1", "2", "4", "8"}
    assert len(set(rows)) == len(rows)
    assert " ep " not in CliRunner().invoke(app, ["plan", SEVENTY, "--search", "--top", "2"]).output


def test_failures_of_16384_gpus_come_as_published_and_chips_fail_as_gpus_do() -> None:
    """A NeuronCore is a part of a chip: two of trn1 fail together, and four of trn2."""
    assert pytest.approx(2.78, abs=0.005) == 1 / (INTERRUPTIONS_PER_CHIP_S * 16_384) / 3600
    published_s = 54 * 86_400 / 466 * 16_384
    assert answer(SEVENTY)["checkpoint"]["mtbf_s"] == pytest.approx(published_s / (256 * 16), rel=1e-6)
    for instance, chips in (("p5", 2 * 8), ("trn2", 2 * 16), ("trn1", 2 * 16)):
        mtbf_s = answer(SEVEN, "--instance", instance, "--nodes", "2", "parallel.dp=0")["checkpoint"]["mtbf_s"]
        assert mtbf_s == pytest.approx(published_s / chips, rel=1e-6)
    assert answer(SEVENTY, "--mtbf-h", "1")["checkpoint"]["mtbf_s"] == 3600
    assert answer(SEVENTY)["checkpoint"]["goodput"] > answer(SEVENTY, "--mtbf-h", "1")["checkpoint"]["goodput"]


def test_tokens_of_data_sets_give_days_and_operations() -> None:
    result = answer(SEVEN, "--dataset", "slimpajama")
    assert result["run"]["tokens"] == DATASETS["slimpajama"].tokens == 627e9
    assert result["days"] == pytest.approx(627e9 / result["tokens_per_s"] / 86_400)
    assert result["run"]["flops_6nd"] == pytest.approx(6 * result["params"] * 627e9)
    assert result["run"]["chinchilla_tokens"] == 20 * result["params"]


@pytest.mark.parametrize("name", DATASETS)
def test_data_sets_have_bytes_that_are_shown_beside_their_tokens(name: str) -> None:
    data_set = DATASETS[name]
    assert answer(SEVEN, "--dataset", name)["run"]["data_bytes"] == data_set.bytes
    shown = CliRunner().invoke(app, ["plan", SEVEN, "--dataset", name]).output
    assert data_set.bytes is not None
    assert f"{data_set.bytes / data_set.tokens:.2f} bytes per token" in shown
    (row,) = (line for line in shapes().splitlines() if line.startswith(f"| `{name}` "))
    tokens, size = (float(cell.strip().removesuffix("e9").replace(",", "")) * 1e9 for cell in row.split("|")[2:4])
    assert (tokens, size) == pytest.approx((data_set.tokens, data_set.bytes))


def test_a_batch_ramp_has_fewer_tokens_and_its_own_days() -> None:
    plain = answer(SEVENTY, "train.steps=1000")
    batch = int(plain["sequences_per_s"] * plain["step_time_s"] + 0.5)
    ramp = f"train.batch_ramp=[{{global_batch = {batch // 2}, samples = {100 * batch}}}]"
    ramped = answer(SEVENTY, "train.steps=1000", ramp)
    assert ramped["run"]["tokens"] == pytest.approx(0.9 * plain["run"]["tokens"])  # 200 steps of half the batch
    assert ramped["run"]["steps"] == 1000
    assert 0.9 * plain["days"] < ramped["days"] < plain["days"]  # the update of a small batch costs as much
    parts = [(part["steps"], part["global_batch"]) for part in ramped["run"]["ramp"]]
    assert parts == [(200, batch // 2), (800, batch)] and plain["run"]["ramp"] == []
    in_time = answer(SEVENTY, "train.steps=1000", ramp, "--device-hours", f"{ramped['run']['device_hours']}")
    assert in_time["run"]["tokens"] == pytest.approx(ramped["run"]["tokens"], rel=2e-3)  # a step begun counts
    assert in_time["days"] == pytest.approx(ramped["days"], rel=2e-3)
    shown = CliRunner().invoke(app, ["plan", SEVENTY, "train.steps=1000", ramp]).output
    assert "ramp, part 1" in shown and f"{batch // 2:,} rows: " in shown and "ramp, part 3" not in shown


ROWS = ("data.doc_mask=true", "data.tokenizer=t.json", "train.seq_len=8192", "train.micro_batch=1", "train.steps=3000")
LENGTHS = "train.seq_ramp=[{seq_len = 1024, tokens = 100_000_000}, {seq_len = 2048, tokens = 200_000_000}]"


@pytest.mark.parametrize(
    ("layout", "is_faster"),
    [
        (("configs/llama3_2_1b_cuda.toml", "--instance", "p5"), True),
        (("configs/llama3_2_1b_cuda.toml", "--instance", "p5", "parallel.cp=2", "compile.torch_compile=false"), False),
        ((SEVEN, "backend.layers=native", "model.config.max_position_embeddings=8192"), False),
    ],
    ids=["flash", "context parallel", "trn1"],
)
def test_parts_of_a_sequence_ramp_have_their_operations_and_time(layout: tuple[str, ...], is_faster: bool) -> None:
    plain, ramped = answer(*layout, *ROWS), answer(*layout, *ROWS, LENGTHS)
    parts, row = ramped["run"]["ramp"], plain["tokens_per_s"] * plain["step_time_s"]
    assert [part["seq_len"] for part in parts] == [1024, 2048, 8192]
    assert [part["steps"] for part in parts[:2]] == [math.ceil(1e8 / row), math.ceil(3e8 / row) - math.ceil(1e8 / row)]
    for part in parts:
        rows_so_short = answer(*layout, *ROWS, f"train.seq_len={part['seq_len']}")
        assert part["flops_per_token"] == rows_so_short["flops_per_token"]
        assert part["mfu"] == pytest.approx(
            part["flops_per_token"]
            / plain["flops_per_token"]
            * plain["mfu"]
            * plain["step_time_s"]
            / part["step_time_s"]
        )
    assert (parts[0]["step_time_s"] < parts[1]["step_time_s"] < plain["step_time_s"]) == is_faster
    assert parts[-1]["step_time_s"] == plain["step_time_s"] >= parts[0]["step_time_s"]
    assert ramped["days"] == pytest.approx(sum(part["steps"] * part["step_time_s"] for part in parts) / 86_400)
    assert ramped["run"]["flops"] == pytest.approx(sum(part["tokens"] * part["flops_per_token"] for part in parts))
    assert ramped["run"]["tokens"] == plain["run"]["tokens"] == sum(part["tokens"] for part in parts)


def test_hours_of_devices_give_the_days_and_the_tokens() -> None:
    """Llama 3.1 70B took 7.0e6 hours of a GPU, and Llama 2 70B's recipe 6.4e6 on 256 machines of 8."""
    layout: tuple[str, ...] = ("parallel.tp=8", "parallel.pp=1", "parallel.dp=0", "--model", "llama3.1-70b")
    layout += ("train.seq_len=8192", "train.global_batch=4096", "train.micro_batch=1", "parallel.shard=full")
    for hours, instance, nodes, days in ((6.4e6, "p5", 256, 130.2), (7.0e6, "p4de", 512, 71.2)):
        result = answer(SEVENTY, "--instance", instance, "--nodes", str(nodes), *layout, "--device-hours", f"{hours}")
        assert result["days"] == pytest.approx(days, abs=0.05)
        assert result["run"]["device_hours"] == pytest.approx(hours)
        assert result["run"]["tokens"] == pytest.approx(result["days"] * 86_400 * result["tokens_per_s"])
    by_steps = answer(SEVENTY)
    world = by_steps["nodes"] * 32
    assert by_steps["run"]["learning_rates"].startswith("steps 1 to 2,000: up to 0.00015 (linear); ")
    changed = ("optim.weight_decay_schedule=decoupled", "optim.beta2_pieces=[{steps=200,to=0.99}]")
    rates = answer(SEVENTY, *changed)["run"]["learning_rates"].removeprefix(by_steps["run"]["learning_rates"])
    assert rates == "; weight decay 0.1 x lr / 0.00015; beta2 steps 1 to 200: up to 0.99 (linear)"
    assert by_steps["run"]["device_hours"] == pytest.approx(by_steps["days"] * 24 * world)
    with pytest.raises(ConfigError, match="--tokens and --device-hours each give the length"):
        answer(SEVEN, "--device-hours", "5", "--tokens", "5")


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_the_whole_model_is_the_sum_of_the_ranks_of_its_stages(method: str) -> None:
    """One tensor parallel rank per stage, and nothing sharded over dp: all bytes but activations are the model's."""
    layout = ("parallel.tp=1", "parallel.pp=1", "parallel.dp=1", "parallel.shard=none", "train.micro_batch=1")
    result = answer("configs/tiny_cpu.toml", "backend.name=cpu", "finetune.r=4", *layout, "--method", method)
    whole, rank = result["model_bytes"], result["bytes"]
    assert (whole["params"], whole["grads"]) == (rank["params"] + rank["frozen"], rank["grads"])
    assert whole["masters"] + whole["moments"] == rank["optimizer"]


def test_a_machine_of_ones_own_is_planned(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        "[box]\ndevices = 8\ndevice_bytes = 80_000_000_000\ndevice_flops = 1e15\nmemory_bytes_s = 3e12\n"
        "link_bytes_s = 4e11\nnetwork_bytes_s = 0\nhost_bytes = 1_000_000_000_000\nhost_threads = 64\n"
        "price_usd_h = 2.0\n",
        encoding="utf-8",
    )
    result = answer("configs/llama3_2_1b_cuda.toml", "--hardware", str(file))
    assert (result["instance"], result["hbm_bytes"], result["parallel"]["dp"]) == ("box", 80_000_000_000, 8)
    with pytest.raises(ConfigError, match="box has no network"):
        answer("configs/llama3_2_1b_cuda.toml", "--hardware", str(file), "--nodes", "2")


def test_presets_of_every_family_can_be_planned() -> None:
    for name in family_names():
        family = find_family(name)
        for preset in family.presets:
            layout = ("parallel.tp=1", "parallel.dp=8", "train.seq_len=2048", "--nodes", "1")
            result = answer(SEVEN, "--model", preset, "--instance", "p5", *layout)
            if preset != "tiny":
                assert result["params"] == family.dimensions(family.preset(preset)).num_params


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


MACHINE = """[box]
devices = 8
device_bytes = 80_000_000_000
device_flops = {rate}
memory_bytes_s = {rate}
link_bytes_s = {rate}
network_bytes_s = {rate}
host_bytes = 1_000
host_threads = 1
price_usd_h = {price}
"""


@pytest.mark.parametrize(
    "argv",
    [
        ("--mtbf-h", "1e-12"),
        ("--mtbf-h", "1e9", "--store-gb-s", "1e6"),
        ("--store-gb-s", "1e-3", "--tokens", "1e18", "--price", "1e9"),
        ("--tokens", "1e-6", "--price", "0"),
    ],
)
@pytest.mark.parametrize(("rate", "price"), [("1e-3", "0"), ("1e12", "20.5"), ("1e200", "1e9")])
def test_extreme_values_give_numbers_that_any_reader_of_json_knows(
    tmp_path: Path, argv: tuple[str, ...], rate: str, price: str
) -> None:
    hardware = tmp_path / "machines.toml"
    hardware.write_text(MACHINE.format(rate=rate, price=price), encoding="utf-8")
    own = ("--hardware", str(hardware), "--instance", "box", "--nodes", "2", "parallel.dp=2", "parallel.tp=8")
    result = CliRunner().invoke(app, ["plan", SEVEN, *own, *argv, "--json"])
    assert result.exception is None
    actual = json.loads(result.output, parse_constant=refuse)
    days = actual["run"]["days_with_failures"]
    assert (days is None) == (actual["checkpoint"]["goodput"] <= 1e-6)
    assert days is None or days >= actual["days"]
    shown = CliRunner().invoke(app, ["plan", SEVEN, *own, *argv])
    assert shown.exception is None
    assert ("failures leave no time" in " ".join(shown.output.split())) == (days is None)


def test_a_message_names_the_option_or_the_key_that_gave_the_machine() -> None:
    with pytest.raises(ConfigError, match=r"--instance: 'p6' is not an instance"):
        answer(SEVEN, "--instance", "p6")
    with pytest.raises(ConfigError, match=r"cluster\.instance: 'p6' is not an instance"):
        answer(SEVEN, "cluster.instance=p6")
