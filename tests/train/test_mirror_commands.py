"""Commands that take a checkpoint take its address in a bucket, and a run folder there, as they take one on a disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from nxtrain.checkpoint import directory
from nxtrain.common import hf_files
from nxtrain.common.errors import BackendError, CheckpointError, ConfigError
from nxtrain.common.io.object_store import open_store
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from nxtrain.tools.compile.cache import Cache
from tests.support.caches import add_done, key
from tests.support.commands import command, write_config
from tests.support.object_stores import (
    BUCKET,
    azure,
    azure_variables,
    gcs,
    gcs_variables,
    needs_azurite,
    s3,
    s3_variables,
)
from tests.support.runs import course

__all__ = ["azure", "azure_variables", "gcs", "gcs_variables", "s3", "s3_variables"]

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
    Tokenizer(models.WordLevel(letters, unk_token="a")).save(str(newest / hf_files.TOKENIZER))
    for file in folder.rglob("*"):
        if file.is_file():
            s3.upload_file(str(file), BUCKET, f"runs/one/{file.relative_to(folder).as_posix()}")
    return folder


def output_of(folder: Path, environ: dict[str, str], *argv: object, code: int = 0) -> str:
    """Output of a command, whose exit code is `code`."""
    result, text = command(folder.parent, *argv, environ=environ)
    assert result == code, text
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
    assert "there is no config.toml with it; give the configuration of its run by --run CONFIG" in text
    text = output_of(run, s3_variables, "convert", "hf-to-nxtrain", run, RUN, code=ConfigError.exit_code)
    assert f"error: {RUN} is not a folder of this machine" in text


@pytest.mark.parametrize(
    ("scheme", "service"), [("gs", "gcs"), pytest.param("az", "azure", marks=needs_azurite)], ids=["gs", "az"]
)
def test_a_run_lives_in_a_bucket_of_another_service(
    tmp_path: Path, request: pytest.FixtureRequest, scheme: str, service: str
) -> None:
    """Rows, mirror, resume after the loss of the disk, export, upload of a corpus and the graph cache."""
    request.getfixturevalue(service)
    environ = request.getfixturevalue(f"{service}_variables")
    root, run = f"{scheme}://{BUCKET}", tmp_path / "run"
    config = write_config(tmp_path, steps=4, every=2)
    output_of(run, {}, "train", config)
    straight = course(run)
    shutil.rmtree(run)

    (rows,) = tmp_path.glob("**/*.npy")
    open_store(f"{root}/data").put("rows.npy", rows.read_bytes())
    there = (f"data.path={root}/data/rows.npy", f"data.cache_dir={tmp_path / 'blocks'}", f"checkpoint.mirror={root}/m")
    output_of(run, environ, "train", config, "train.steps=2", "optim.decay_steps=4", *there)
    mirrored = open_store(f"{root}/m").sizes()
    assert {"step-00000002/meta.json", "step-00000002/manifest.json"} <= mirrored.keys()
    first = course(run)
    shutil.rmtree(run)
    assert "continues after step 2" in output_of(run, environ, "train", config, *there)
    assert first + course(run) == straight

    for name, model, variables in (("here", run, {}), ("there", f"{root}/m", environ)):
        output_of(run, variables, "convert", "nxtrain-to-hf", model, tmp_path / name)
    weights = "model.safetensors"
    assert (tmp_path / "here" / weights).read_bytes() == (tmp_path / "there" / weights).read_bytes()

    (tmp_path / "words.txt").write_text("some words of a document\n" * 50)
    output_of(run, environ, "data", "prepare", tmp_path / "words.txt", "--out", tmp_path / "w.arrow", "--upload", root)
    prepared = open_store(root)
    prepared.download("w.arrow", tmp_path / "back.arrow")
    assert (tmp_path / "back.arrow").read_bytes() == (tmp_path / "w.arrow").read_bytes()
    output_of(run, environ, "data", "inspect", f"{root}/w.arrow", "--verify")

    cache = tmp_path / "cache"
    add_done(cache, key(1))
    output_of(run, environ, "cache", "sync", cache, f"{root}/graphs")
    output_of(run, environ, "cache", "sync", f"{root}/graphs", tmp_path / "again")
    assert [entry.key for entry in Cache(tmp_path / "again").entries()] == [key(1)]


@pytest.mark.parametrize("address", ["gs://bucket/run", "az://bucket/run"])
def test_a_bucket_without_rights_is_refused_with_the_way_out(tmp_path: Path, address: str) -> None:
    config = write_config(tmp_path)
    variables = ("STORAGE_EMULATOR_HOST", "AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT")
    bare = {"HOME": str(tmp_path), "NO_GCE_CHECK": "true", **dict.fromkeys(variables, "")}
    mirror = f"checkpoint.mirror={address}"
    text = output_of(tmp_path / "run", bare, "train", config, mirror, code=BackendError.exit_code)
    assert address in text and ("credentials" in text or "AZURE_STORAGE_CONNECTION_STRING" in text)
