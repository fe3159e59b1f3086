"""A run that went through NeuronX Distributed's files goes on as if it had not, by the commands that people use."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from nxtrain.cli import main as cli
from tests.support.runs import TIMINGS, records, token_file


def main(monkeypatch: pytest.MonkeyPatch, *args: object) -> int:
    monkeypatch.setattr(sys, "argv", ["nxtrain", *map(str, args)])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    return int(raised.value.code or 0)


def test_a_run_goes_on_from_rank_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = token_file(tmp_path / "rows.npy", 64)
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\npreset = "tiny"\n[model.config]\nvocab_size = 128\n'
        "[train]\nsteps = 4\nseq_len = 16\nglobal_batch = 4\nmicro_batch = 2\n[optim]\nlr = 1e-2\n"
        f'[data]\nsource = "tokens"\npath = "{data}"\n[checkpoint]\nevery = 2\n[backend]\nname = "cpu"\n'
        '[precision]\nparams = "bf16"\nupdate = "fp32_master"\n[metrics]\nlog_every = 1\nprogress = false\n',
        encoding="utf-8",
    )
    whole, nxd, back = tmp_path / "whole", tmp_path / "nxd", tmp_path / "other/checkpoints/step-00000002"
    assert main(monkeypatch, "train", file, f"run.dir={whole}") == 0
    step2 = whole / "checkpoints/step-00000002"
    assert main(monkeypatch, "convert", "nxtrain-to-nxd", step2, nxd, "--tp", "2", "--dp", "2") == 0
    (nxd / "step_2/user_content.pt").unlink()  # as if a script of NxD's had written the tag
    assert main(monkeypatch, "convert", "nxd-to-nxtrain", nxd, back) == 0
    assert "no run can go on from it: " in capsys.readouterr().out
    assert main(monkeypatch, "convert", "nxd-to-nxtrain", nxd, back, "--run", file) == 0
    assert f"{back} holds model, exp_avg, exp_avg_sq, master at step 2\n" in capsys.readouterr().out
    assert main(monkeypatch, "train", file, f"run.dir={tmp_path / 'other'}") == 0
    untold, told = (
        [{key: value for key, value in line.items() if key not in TIMINGS} for line in records(folder)]
        for folder in (whole, tmp_path / "other")
    )
    assert [line["step"] for line in told] == [3, 4]
    assert told == untold[2:]


def test_the_settings_of_the_optimizer_come_from_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = token_file(tmp_path / "rows.npy", 16)
    values = ("model.config.vocab_size=128", "train.steps=2", "train.seq_len=16", "train.global_batch=4")
    more = (
        "train.micro_batch=4",
        "train.eval_every=0",
        "data.source=tokens",
        f"data.path={data}",
        "checkpoint.every=2",
    )
    schedule = ("optim.warmup_steps=10", "optim.decay_steps=100", "optim.lr=1e-2", "data.validation_fraction=0")
    folder = tmp_path / "run"
    args = ("train", "configs/tiny_cpu.toml", *values, *more, *schedule, f"run.dir={folder}")
    assert main(monkeypatch, *args) == 0
    assert main(monkeypatch, "convert", "nxtrain-to-nxd", folder, tmp_path / "nxd") == 0
    content = torch.load(tmp_path / "nxd/step_2/optim/dp_rank_00_tp_rank_00_pp_rank_00.pt", weights_only=True)
    assert [group["lr"] for group in content["param_groups"]] == [3e-3, 3e-3]  # of the third update, of ten to warm up
    assert torch.load(tmp_path / "nxd/step_2/scheduler.pt", weights_only=True)["last_epoch"] == 2
    (folder / "config.toml").unlink()
    assert main(monkeypatch, "convert", "nxtrain-to-nxd", folder, tmp_path / "again") == 2
    assert "keeps no settings of the optimizer" in capsys.readouterr().err
    assert main(monkeypatch, "convert", "nxtrain-to-nxd", folder, tmp_path / "again", "--weights-only") == 0
