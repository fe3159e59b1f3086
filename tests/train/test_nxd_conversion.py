"""A run that went through NeuronX Distributed's files goes on as if it had not, by the commands that people use."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.commands import errors_of, in_process, output_of
from tests.support.corpora import documents, prepare, write_corpus, write_tokenizer
from tests.support.runs import course, token_file, write_toml


def test_a_run_goes_on_from_rank_files(tmp_path: Path) -> None:
    file = write_toml(
        tmp_path,
        num_rows=64,
        model={"preset": "tiny", "config": {"vocab_size": 128}},
        train={"steps": 4, "global_batch": 4, "micro_batch": 2},
        optim={"lr": 1e-2},
        checkpoint={"every": 2},
        precision={"params": "bf16", "update": "fp32_master"},
    )
    whole, nxd, back = tmp_path / "whole", tmp_path / "nxd", tmp_path / "other/checkpoints/step-00000002"
    assert in_process("train", file, f"run.dir={whole}")[0] == 0
    step2 = whole / "checkpoints/step-00000002"
    assert in_process("convert", "nxtrain-to-nxd", step2, nxd, "--tp", "2", "--dp", "2")[0] == 0
    (nxd / "step_2/user_content.pt").unlink()  # as if a script of NxD's had written the tag
    said = output_of("convert", "nxd-to-nxtrain", nxd, back)
    assert "no run can resume from it, since " in said
    said = output_of("convert", "nxd-to-nxtrain", nxd, back, "--run", file)
    assert f"{back} holds model, exp_avg, exp_avg_sq, master at step 2\n" in said
    assert in_process("train", file, f"run.dir={tmp_path / 'other'}")[0] == 0
    untold, output = course(whole), course(tmp_path / "other")
    assert [line["step"] for line in output] == [3, 4]
    assert output == untold[2:]


def test_the_settings_of_the_optimizer_come_from_the_run(tmp_path: Path) -> None:
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
    assert in_process(*args)[0] == 0
    assert in_process("convert", "nxtrain-to-nxd", folder, tmp_path / "nxd")[0] == 0
    content = torch.load(tmp_path / "nxd/step_2/optim/dp_rank_00_tp_rank_00_pp_rank_00.pt", weights_only=True)
    assert [group["lr"] for group in content["param_groups"]] == [3e-3, 3e-3]  # of the third update, of ten to warm up
    assert torch.load(tmp_path / "nxd/step_2/scheduler.pt", weights_only=True)["last_epoch"] == 2
    (folder / "config.toml").unlink()
    said = errors_of("convert", "nxtrain-to-nxd", folder, tmp_path / "again", code=2)
    assert "contains no optimizer settings" in said
    assert in_process("convert", "nxtrain-to-nxd", folder, tmp_path / "again", "--weights-only")[0] == 0


def test_a_run_on_documents_goes_on_from_rank_files_where_it_was(tmp_path: Path) -> None:
    """The position in documents that are packed during training is not a number of samples."""
    corpus, vocabulary = tmp_path / "corpus.arrow", 300
    prepare(write_corpus(tmp_path / "src", "a.jsonl", documents(40)), out=corpus)
    file = write_toml(
        tmp_path,
        model={"preset": "tiny", "config": {"vocab_size": vocabulary}},
        train={"steps": 4, "global_batch": 4, "micro_batch": 2},
        data={"source": "arrow", "path": str(corpus), "tokenizer": str(write_tokenizer(tmp_path / "t", vocabulary))},
        checkpoint={"every": 2},
    )
    whole, nxd, other = tmp_path / "whole", tmp_path / "nxd", tmp_path / "other"
    assert in_process("train", file, f"run.dir={whole}")[0] == 0
    assert in_process("convert", "nxtrain-to-nxd", whole / "checkpoints/step-00000002", nxd)[0] == 0
    assert in_process("convert", "nxd-to-nxtrain", nxd, other / "checkpoints/step-00000002")[0] == 0
    assert in_process("train", file, f"run.dir={other}")[0] == 0
    assert course(other) == course(whole)[2:]
    (nxd / "step_2/user_content.pt").unlink()  # as if a script of NxD's had written the tag
    back = tmp_path / "foreign/checkpoints/step-00000002"
    assert in_process("convert", "nxd-to-nxtrain", nxd, back, "--run", file)[0] == 0
    said = errors_of("train", file, f"run.dir={tmp_path / 'foreign'}", code=0)
    assert "step 2 has no position in documents that are packed during training" in " ".join(said.split())
