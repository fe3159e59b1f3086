"""The command line as people and scripts meet it: messages, exit codes, and no waiting for torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import nxtrain
from nxtrain.cli import main as cli
from nxtrain.common.errors import ConfigError, DataError, NxtrainError, Problem
from nxtrain.config.load import load
from nxtrain.launch.local import AGENT, render

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = str(CONFIGS / "tiny_cpu.toml")
DEMO = CONFIGS / "demo.toml"

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


def main(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["nxtrain", *args])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    return int(raised.value.code or 0)


def test_help_comes_without_torch_and_names_every_command() -> None:
    done = command("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for name in ("train", "launch", "graphs", "generate", "convert", "config", "cache", "bench"):
        assert f" {name} " in done.stdout


@pytest.mark.parametrize(
    "args",
    [
        ["train"],
        ["launch"],
        ["graphs"],
        ["generate"],
        ["convert", "hf-to-nxtrain"],
        ["convert", "nxtrain-to-hf"],
        ["convert", "nxd-to-nxtrain"],
        ["convert", "nxtrain-to-nxd"],
        ["config", "show"],
        ["config", "keys"],
        ["bench", "train"],
        ["bench", "pipeline"],
        ["cache", "ls"],
        ["cache", "verify"],
        ["cache", "sync"],
        ["cache", "clean"],
    ],
    ids=" ".join,
)
def test_every_command_shows_an_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    assert main(monkeypatch, *args, "--help") == 0
    assert "Example: " in capsys.readouterr().out


def test_the_version_is_that_of_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"nxtrain {nxtrain.__version__}\n"
    assert nxtrain.__version__ == version("nxtrain")


def test_the_schedule_is_drawn_or_given_as_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show = ("config", "show", TINY, "--schedule", "optim.schedule=wsd", "train.steps=40", "optim.lr=1.0")
    assert main(monkeypatch, *show) == 0
    drawn = capsys.readouterr().out
    assert drawn.count("*") == 40 and "down to" in drawn.splitlines()[-1]
    assert main(monkeypatch, *show, "--json") == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["steps"], numbers["lr"][30]) == (list(range(1, 41)), 1.0)
    assert main(monkeypatch, *show, "optim.decay_steps=90") == 2


def test_config_show_prints_toml_that_loads_equal_without_torch(tmp_path: Path) -> None:
    done = command("config", "show", TINY, "train.steps=7", "optim.warmup_steps=1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "steps = 7  # override" in done.stdout
    again = tmp_path / "again.toml"
    again.write_text(done.stdout, encoding="utf-8")
    assert load(again).config == load(TINY, ["train.steps=7", "optim.warmup_steps=1"]).config


def test_config_show_prints_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(monkeypatch, "config", "show", TINY, "--json", "run.seed=3") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["run"]["seed"], shown["origins"]["run.seed"]) == (3, "override")


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
    place = {"RANK": "32", "WORLD_SIZE": "64", "LOCAL_WORLD_SIZE": "32"}
    first, second = (command("train", TINY, "train.steps=x", LOCAL_RANK=rank, **place) for rank in "01")
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
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: NxtrainError,
    rank: str | None,
    code: int,
    printed: str,
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setattr(os, "_exit", sys.exit)  # a rank of several ends at once
    assert main(monkeypatch) == code
    assert capsys.readouterr().err == printed


def test_a_long_message_stays_on_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(monkeypatch, "train", "x" * 200 + ".toml") == 2
    assert f"error: cannot read {'x' * 200}.toml: No such file or directory\n" in capsys.readouterr().err


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr(cli, "app", fail)
    assert main(monkeypatch, "train") == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert "RuntimeError: bug" in said
    assert said.endswith(f"{cli.DEFECT}\n")


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", interrupt)
    assert main(monkeypatch, "train", TINY) == 130


def test_launch_prints_the_command_and_starts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "launch", str(DEMO), "--dry-run", "--nproc", "2", "run.name=a b") == 0
    printed = capsys.readouterr().out
    assert " --nproc-per-node=2 " in printed
    assert printed.endswith(f" -m nxtrain train {DEMO} 'run.name=a b'\n")


def test_launch_refuses_targets_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "launch", str(DEMO), "--target", "nomad") == 2
    assert "'nomad' is not one of 'local'" in capsys.readouterr().err
    assert main(monkeypatch, "launch", str(DEMO), "--target", "kubernetes") == 2
    assert "--target kubernetes starts nothing itself: use --out DIR" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert main(monkeypatch, "launch", str(DEMO), "--target", "slurm") == 5
    assert "sbatch, a program of Slurm, is not on PATH" in capsys.readouterr().err


def test_launch_shows_or_writes_the_files_of_a_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("launch", str(DEMO), "--target", "kubernetes", "--image", "mine", "--claim", "disk")
    assert main(monkeypatch, *words, "--out", str(tmp_path / "a/b")) == 0
    names = ["pytorchjob.yaml", "mpijob.yaml", "jobset.yaml", "Dockerfile"]
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "a/b" / name) for name in names]
    texts = {name: (tmp_path / "a/b" / name).read_text(encoding="ascii") for name in names}
    assert "claimName: disk\n" in texts["jobset.yaml"]
    assert main(monkeypatch, *words, "--dry-run") == 0
    assert capsys.readouterr().out == "\n".join(f"# ===== {name}\n{text}" for name, text in texts.items())


@pytest.mark.parametrize(("overrides", "nproc"), [([], 2), (["parallel.dp=4"], 4), (["parallel.tp=2"], 4)])
def test_launch_starts_as_many_ranks_as_the_degrees_ask_for(overrides: list[str], nproc: int) -> None:
    assert f"--nproc-per-node={nproc}" in render(DEMO, [*overrides, "train.micro_batch=1"], None, {}).argv


def test_launch_starts_a_lone_rank_without_torchrun() -> None:
    argv = (sys.executable, "-m", "nxtrain", "train", TINY, "run.seed=1")
    assert render(Path(TINY), ["run.seed=1"], None, {}).argv == argv
    restarted = render(Path(TINY), ["run.seed=1", "recovery.max_restarts=2"], None, {}).argv
    assert {*AGENT, "--nproc-per-node=1", "--max-restarts=2"} <= {*restarted}, "which needs somebody to start it again"


def test_launch_checks_the_ranks_against_the_degrees() -> None:
    with pytest.raises(ConfigError, match="tp=2 x pp=1 = 2 does not divide the world of 3 ranks"):
        render(DEMO, ["parallel.tp=2", "parallel.dp=0"], 3, {})
    with pytest.raises(ConfigError, match="nodes=2, but this is one machine"):
        render(DEMO, ["cluster.nodes=2"], None, {})


@pytest.mark.parametrize("number", ["0", "-1", "9", "1", "many"])
@pytest.mark.parametrize("target", ["local", "slurm"])
def test_a_number_of_machines_that_no_run_can_shrink_to_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: str, number: str
) -> None:
    words = ("launch", str(DEMO), "parallel.dp=0", "--target", target, "--min-nodes", number, "--dry-run")
    assert main(monkeypatch, *words) == 2
    assert "min-nodes" in capsys.readouterr().err


def test_launch_restarts_as_often_as_the_configuration_says() -> None:
    assert "--max-restarts=3" in render(DEMO, ["recovery.max_restarts=3"], None, {}).argv


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


def test_a_full_disk_under_the_output_is_told() -> None:
    """A full disk is no closed pipe: half a table that looks whole would be worse than an error."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full, the disk that is always full; runs on Linux")
    with open("/dev/full", "w") as full:
        said = subprocess.run(
            [sys.executable, "-m", "nxtrain", "config", "keys"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert said.returncode
    assert b"No space left on device" in said.stderr
