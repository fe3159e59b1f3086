"""The command line as people and scripts meet it: messages, exit codes, and no waiting for torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import pytest

import nxtrain
from nxtrain.cli import main as cli
from nxtrain.common.errors import ConfigError, DataError, NxtrainError, Problem
from nxtrain.config.load import load
from nxtrain.launch.local import AGENT
from tests.support import DEMO
from tests.support import TINY as TINY_FILE
from tests.support.commands import errors_of, in_process, output_of
from tests.support.launch_cases import local_command

TINY = str(TINY_FILE)

# Runs the command line and fails if torch was imported on the way.
WITHOUT_TORCH = """
import sys
from nxtrain.cli.main import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""


def command(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE"}}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *args],
        env={**environ, "COLUMNS": "200", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_comes_without_torch_and_names_every_command() -> None:
    done = command("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("train", "launch", "graphs", "generate", "convert", "config", "cache", "bench"):
        assert f" {name} " in done.stdout


def test_the_version_is_that_of_the_package() -> None:
    assert in_process("--version") == (0, f"nxtrain {nxtrain.__version__}\n", "")
    assert nxtrain.__version__ == version("nxtrain")


def test_the_schedule_is_drawn_or_given_as_numbers() -> None:
    show = ("config", "show", TINY, "--schedule", "optim.schedule=wsd", "train.steps=40", "optim.lr=1.0")
    code, drawn, _ = in_process(*show)
    assert code == 0
    assert drawn.count("*") == 40 and "down to" in drawn.splitlines()[-1]
    code, printed, _ = in_process(*show, "--json")
    numbers = json.loads(printed)
    assert code == 0
    assert (numbers["steps"], numbers["lr"][30]) == (list(range(1, 41)), 1.0)
    assert in_process(*show, "optim.decay_steps=90")[0] == 2


def test_numbers_that_change_are_drawn_after_the_learning_rate() -> None:
    changed = ("optim.weight_decay_schedule=corrected", "optim.beta2_pieces=[{steps=20,to=0.99}]", "optim.lr=1.0")
    show = ("config", "show", TINY, "--schedule", "train.steps=40", *changed)
    code, drawn, _ = in_process(*show)
    assert code == 0
    assert drawn.count("*") == 80 and "\nbeta2\n" in drawn and "steps 1 to 20: up to 0.99 (linear)" in drawn
    assert drawn.splitlines()[-1] == "weight decay of an update: 0.1 x lr^2 / 1"
    numbers = json.loads(in_process(*show, "--json")[1])
    assert (numbers["beta2"][9], numbers["beta2"][39]) == (pytest.approx(0.97), 0.99)


def test_config_show_prints_toml_that_loads_equal_without_torch(tmp_path: Path) -> None:
    done = command("config", "show", TINY, "train.steps=7", "optim.warmup_steps=1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "steps = 7  # override" in done.stdout
    again = tmp_path / "again.toml"
    again.write_text(done.stdout, encoding="utf-8")
    assert load(again).config == load(TINY, ["train.steps=7", "optim.warmup_steps=1"]).config


def test_config_show_prints_json() -> None:
    code, printed, _ = in_process("config", "show", TINY, "--json", "run.seed=3")
    shown = json.loads(printed)
    assert (code, shown["run"]["seed"], shown["origins"]["run.seed"]) == (0, 3, "override")


def test_config_keys_lists_every_key_without_torch() -> None:
    done = command("config", "keys")
    assert (done.returncode, done.stderr) == (0, "")
    for words in (["optim.lr", "float", "0.0003"], ["checkpoint.async", "bool", "true"], ["model.config", "table"]):
        assert any(line.split()[: len(words)] == words for line in done.stdout.splitlines()), words


@pytest.mark.parametrize("name", ["train", "launch"])
def test_a_bad_configuration_is_reported_in_full_without_traceback_or_torch(name: str) -> None:
    done = command(name, TINY, "parallel.tp=3", "optim.min_lr=1", "train.global_batch=3", "train.micro_batch=2")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert [line.split(" ")[1] for line in done.stderr.splitlines() if line.startswith("error: ")][:3] == [
        "train.global_batch",
        "optim.min_lr",
        "parallel.tp",
    ]


def test_unknown_keys_come_with_the_nearest_name() -> None:
    done = command("train", TINY, "optim.lrr=1", "train.stepz=1")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: train.stepz (override): unknown key",
        "    did you mean train.steps?",
        "error: optim.lrr (override): unknown key",
        "    did you mean optim.lr?",
    ]


def test_of_many_ranks_only_the_first_prints_a_configuration_error() -> None:
    first, second = (command("train", TINY, "train.steps=x", RANK=rank, WORLD_SIZE="2") for rank in "01")
    assert (first.returncode, second.returncode) == (2, 2)
    assert first.stderr.startswith("error: train.steps")
    assert second.stderr == ""


def test_every_node_prints_what_is_wrong_with_it_alone() -> None:
    """A shell, a mount and an instance are a node's own: the ranks of the first may find nothing."""
    placement = {"RANK": "32", "WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "32"}
    first, second = (command("train", TINY, "train.steps=x", LOCAL_RANK=rank, **placement) for rank in "01")
    assert first.stderr.startswith("error: rank 32: train.steps")
    assert second.stderr == ""


def test_the_world_of_torchrun_is_checked() -> None:
    done = command("train", TINY, "parallel.tp=2", RANK="0", WORLD_SIZE="3")
    assert done.returncode == 2
    assert "does not divide the world of 3 ranks" in done.stderr


@pytest.mark.parametrize(
    ("error", "rank", "code", "printed"),
    [
        (DataError("row 3 is torn"), "1", 3, "error: rank 1: row 3 is torn\n"),
        (DataError("row 3 is [torn]"), None, 3, "error: row 3 is [torn]\n"),
        (
            ConfigError([Problem("a.b", "x"), Problem("c", "y", "z", "w")]),
            None,
            2,
            "error: a.b: x\nerror: c (z): y\n    w\n",
        ),
        (ConfigError("x"), "1", 2, ""),
    ],
)
def test_a_failure_prints_its_message_and_exits_with_its_code(
    monkeypatch: pytest.MonkeyPatch, error: NxtrainError, rank: str | None, code: int, printed: str
) -> None:
    monkeypatch.setattr(cli, "app", mock.Mock(side_effect=error))
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr(os, "_exit", sys.exit)  # a rank of several ends at once
    assert in_process() == (code, "", printed)


def test_a_long_message_stays_on_one_line() -> None:
    errors = errors_of("train", "x" * 200 + ".toml", code=2)
    assert f"error: cannot read {'x' * 200}.toml: No such file or directory\n" in errors


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nxtrain.config.check.resolve_config", mock.Mock(side_effect=KeyboardInterrupt))
    assert in_process("train", TINY)[0] == 130
    monkeypatch.setattr("typer.main.get_command", mock.Mock(side_effect=KeyboardInterrupt))
    assert in_process("train", TINY) == (130, "", "")


def test_launch_prints_the_command_and_starts_nothing() -> None:
    printed = output_of("launch", DEMO, "--dry-run", "--nproc", "2", "run.name=a b")
    assert " --nproc-per-node=2 " in printed
    assert printed.endswith(f" -m nxtrain train {DEMO} 'run.name=a b'\n")


@pytest.mark.parametrize(
    ("target", "code", "reason"),
    [
        ("nomad", 2, "'nomad' is not one of 'local'"),
        ("kubernetes", 2, "--target kubernetes cannot submit a job: use --out DIR"),
        ("slurm", 5, "sbatch, a program of Slurm, is not on PATH"),
    ],
)
def test_launch_refuses_targets_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, target: str, code: int, reason: str
) -> None:
    monkeypatch.setenv("PATH", "")
    result, _, errors = in_process("launch", DEMO, "--target", target)
    assert (result, reason in errors) == (code, True)


def test_launch_shows_or_writes_the_files_of_a_cluster(tmp_path: Path) -> None:
    words = ("launch", DEMO, "--target", "kubernetes", "--image", "mine", "--claim", "disk")
    code, printed, _ = in_process(*words, "--out", tmp_path / "a/b")
    names = ["pytorchjob.yaml", "mpijob.yaml", "jobset.yaml", "Dockerfile"]
    assert (code, printed.splitlines()) == (0, [str(tmp_path / "a/b" / name) for name in names])
    texts = {name: (tmp_path / "a/b" / name).read_text(encoding="ascii") for name in names}
    assert "claimName: disk\n" in texts["jobset.yaml"]
    shown = "\n".join(f"# ===== {name}\n{text}" for name, text in texts.items())
    assert in_process(*words, "--dry-run") == (0, shown, "")


@pytest.mark.parametrize(("overrides", "nproc"), [([], 2), (["parallel.dp=4"], 4), (["parallel.tp=2"], 4)])
def test_launch_starts_as_many_ranks_as_the_degrees_ask_for(overrides: list[str], nproc: int) -> None:
    assert f"--nproc-per-node={nproc}" in local_command(DEMO, [*overrides, "train.micro_batch=1"], None, {}).argv


def test_launch_starts_a_lone_rank_without_torchrun() -> None:
    argv = (sys.executable, "-m", "nxtrain", "train", TINY, "run.seed=1")
    assert local_command(Path(TINY), ["run.seed=1"], None, {}).argv == argv
    restarted = local_command(Path(TINY), ["run.seed=1", "recovery.max_restarts=2"], None, {}).argv
    assert {*AGENT, "--nproc-per-node=1", "--max-restarts=2"} <= {*restarted}, "which needs somebody to start it again"


def test_launch_checks_the_ranks_against_the_degrees() -> None:
    with pytest.raises(ConfigError, match="tp=2 x pp=1 = 2 does not divide the world of 3 ranks"):
        local_command(DEMO, ["parallel.tp=2", "parallel.dp=0"], 3, {})
    with pytest.raises(ConfigError, match="nodes=2, but this is one machine"):
        local_command(DEMO, ["cluster.nodes=2"], None, {})


@pytest.mark.parametrize("number", ["0", "-1", "9", "1", "many"])
@pytest.mark.parametrize("target", ["local", "slurm"])
def test_a_number_of_machines_that_no_run_can_shrink_to_is_refused(target: str, number: str) -> None:
    words = ("launch", DEMO, "parallel.dp=0", "--target", target, "--min-nodes", number, "--dry-run")
    code, _, errors = in_process(*words)
    assert (code, "min-nodes" in errors) == (2, True)


@pytest.mark.parametrize("end", ["pipe", "terminal"])
@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("--help",), 0),
        (("config", "keys"), 0),
        (("config", "show", TINY), 0),
        (("config", "show", TINY, "a=1"), 2),
        (("launch", TINY, "--dry-run"), 0),
        (("nope",), 2),
    ],
)
def test_a_command_outlives_whoever_reads_it(argv: tuple[str, ...], code: int, end: str) -> None:
    """Both streams are a pipe without a reader, or a terminal that was closed under nohup."""
    reading, writing = os.pipe() if end == "pipe" else os.openpty()
    os.close(reading)
    errors = "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.dup2({}, 1); os.dup2({}, 2)\n"
    said = subprocess.run(
        [sys.executable, "-c", errors.format(writing, writing) + WITHOUT_TORCH, *argv],
        pass_fds=[writing],
        capture_output=True,
        check=False,
        timeout=60,
    )
    os.close(writing)
    assert said.returncode == code
