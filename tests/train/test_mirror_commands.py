"""Commands that take a checkpoint take its address in S3, and a run folder there, as they take one on a disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from nxtrain.checkpoint import directory
from nxtrain.common.errors import CheckpointError, ConfigError
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from tests.support.commands import command, write_config
from tests.support.s3 import BUCKET, s3, s3_variables

__all__ = ["s3", "s3_variables"]

RUN = f"s3://{BUCKET}/runs/one"


@pytest.fixture
def run(tmp_path: Path, s3: Any, s3_variables: dict[str, str]) -> Path:
    """The folder of a run whose last checkpoint has a tokenizer, and all of which lies in S3 too."""
    write_config(tmp_path, steps=4, every=2)
    code, output = command(tmp_path, "train", tmp_path / "config.toml")
    assert code == 0, output
    folder = tmp_path / "run"
    newest = directory.newest(folder / CHECKPOINTS_DIR)
    assert newest is not None
    letters = {letter: number for number, letter in enumerate("abcdefgh")}
    Tokenizer(models.WordLevel(letters, unk_token="a")).save(str(newest / directory.TOKENIZER))
    for file in folder.rglob("*"):
        if file.is_file():
            s3.upload_file(str(file), BUCKET, f"runs/one/{file.relative_to(folder).as_posix()}")
    return folder


def output_of(folder: Path, environ: dict[str, str], *argv: object, code: int = 0) -> str:
    """Output of a command, whose exit code is `code`."""
    found, text = command(folder.parent, *argv, environ=environ)
    assert found == code, text
    return text


def test_what_reads_a_checkpoint_reads_it_from_s3(run: Path, s3_variables: dict[str, str]) -> None:
    options = ("--prompt", "b", "--max-new-tokens", 3, "--temperature", 0)
    origin, _, text = output_of(run, {}, "generate", run, *options).partition("\n")
    step = f"{CHECKPOINTS_DIR}/step-00000004"
    assert origin == f"from {run}/{step}, step 4"
    for location in (RUN, f"{RUN}/{CHECKPOINTS_DIR}"):
        assert output_of(run, s3_variables, "generate", location, *options) == f"from {RUN}/{step}, step 4\n{text}"
    assert output_of(run, s3_variables, "generate", f"{RUN}/{step}", *options) == text

    for name, location, environ in (("here", str(run), {}), ("there", RUN, s3_variables)):
        out = run.parent / name
        output_of(run, environ, "convert", "nxtrain-to-hf", location, out / "hf")
        output_of(run, environ, "convert", "nxtrain-to-nxd", location, out / "nxd", "--run", run.parent / "config.toml")
    files = [path.relative_to(run.parent / "here") for path in (run.parent / "here").rglob("*") if path.is_file()]
    assert len(files) > 5
    for file in files:
        if file.suffix in {".safetensors", ".json"}:
            assert (run.parent / "here" / file).read_bytes() == (run.parent / "there" / file).read_bytes(), file

    more = ("train.steps=6", f"run.dir={run.parent / 'more'}", f"checkpoint.resume={RUN}")
    assert "continues after step 4" in output_of(run, s3_variables, "train", run.parent / "config.toml", *more)


def test_what_cannot_be_read_or_written_there_says_so(run: Path, s3_variables: dict[str, str]) -> None:
    text = output_of(
        run, s3_variables, "generate", f"s3://{BUCKET}/none", "--prompt", "b", code=CheckpointError.exit_code
    )
    assert f"error: s3://{BUCKET}/none holds no complete checkpoint; give a step, a checkpoint.mirror or a run" in text
    text = output_of(
        run, s3_variables, "convert", "nxtrain-to-nxd", RUN, run.parent / "nxd", code=ConfigError.exit_code
    )
    assert "there is no config.toml with it; name the configuration of its run: --run CONFIG" in text
    text = output_of(run, s3_variables, "convert", "hf-to-nxtrain", run, RUN, code=ConfigError.exit_code)
    assert f"error: {RUN} is no folder of this machine" in text
