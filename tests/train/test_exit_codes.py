"""A cause ends every command with the same exit code."""

from __future__ import annotations

import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.commands import in_process, output_of, write_config
from tests.support.run_folders import as_nobody


@dataclass(frozen=True)
class Inputs:
    config: Path
    run: Path
    hf: Path
    text: Path


@pytest.fixture(scope="module")
def inputs() -> Iterator[Inputs]:
    folder = Path(tempfile.mkdtemp(prefix="nxtrain-inputs-"))
    folder.chmod(0o755)
    made = Inputs(write_config(folder, steps=1, every=1), folder / "run", folder / "hf", folder / "text.txt")
    made.text.write_text("some words of a text\n" * 200)
    for argv in (
        ("train", made.config, "data.source=text", f"data.path={made.text}"),
        ("convert", "nxtrain-to-hf", made.run, made.hf),
    ):
        output_of(*argv)
    yield made
    shutil.rmtree(folder)


def train(made: Inputs, out: Path) -> tuple[object, ...]:
    return ("train", made.config, f"run.dir={out}", "data.source=text", f"data.path={made.text}")


def launch(made: Inputs, out: Path) -> tuple[object, ...]:
    return ("launch", made.config, "--target", "slurm", "--out", out)


def prepare(made: Inputs, out: Path) -> tuple[object, ...]:
    return ("data", "prepare", made.text, "--out", f"{out}.arrow")


def report(made: Inputs, out: Path) -> tuple[object, ...]:
    return ("report", made.run, "--out", f"{out}.html")


def to_hf(made: Inputs, out: Path) -> tuple[object, ...]:
    return ("convert", "nxtrain-to-hf", made.run, out)


def from_hf(made: Inputs, out: Path) -> tuple[object, ...]:
    return ("convert", "hf-to-nxtrain", made.hf, out)


Writer = Callable[[Inputs, Path], tuple[object, ...]]

WRITERS: tuple[Writer, ...] = (train, launch, prepare, report, to_hf, from_hf)


def without_rights(folder: Path) -> Path:
    folder.mkdir()
    folder.chmod(0o500)
    return folder / "out"


def below_a_file(folder: Path) -> Path:
    folder.touch()
    return folder / "out"


def below_a_loop(folder: Path) -> Path:
    folder.symlink_to(folder.name)
    return folder / "out"


def named_too_long(folder: Path) -> Path:
    folder.mkdir()
    return folder / ("x" * 256)


OBSTACLES = {without_rights: 5, below_a_file: 2, below_a_loop: 2, named_too_long: 2}
"""Codes of the table of docs/recovery.md."""


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_an_output_that_cannot_be_written_has_the_code_of_its_cause(
    writer: Writer, inputs: Inputs, tmp_path: Path
) -> None:
    output_of(*writer(inputs, tmp_path / "out"))
    results = {}
    with as_nobody() as home:  # who may import nothing: all that the command needs is imported by now
        for obstacle in OBSTACLES:
            code, _, said = in_process(*writer(inputs, obstacle(home / obstacle.__name__)))
            results[obstacle] = code
            assert said.count("error: ") == 1, said
            assert "[Errno" not in said
            assert str(home) in said
    assert results == OBSTACLES


@contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """Files of this process cannot grow beyond a size; the system refuses a write, after part of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [0, 500, 4000])
@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_a_file_that_may_not_grow_is_named_with_a_way_out(
    writer: Writer, num_bytes: int, inputs: Inputs, tmp_path: Path
) -> None:
    """The system names no file when a write fails, so that each command has to."""
    with limited(num_bytes):
        code, _, said = in_process(*writer(inputs, tmp_path / "out"))
    if (writer, num_bytes) == (launch, 4000):  # its files are small
        assert code == 0
        return
    (line,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert code == 4 and str(tmp_path / "out") in line and "File too large" in line and "ulimit -f" in line, said
    assert "the system" not in said and "draft" not in said


def generate(model: Path) -> tuple[object, ...]:
    return ("generate", model, "--prompt", "some", "--max-new-tokens", 1)


def evaluate(model: Path) -> tuple[object, ...]:
    return ("eval", model, "--tasks", "copying", "--limit", 1)


def convert(model: Path) -> tuple[object, ...]:
    return ("convert", "nxtrain-to-hf", model, model.with_name("converted"))


def convert_hf(model: Path) -> tuple[object, ...]:
    return ("convert", "hf-to-nxtrain", model, model.with_name("converted"))


def _damage_weights(model: Path) -> None:
    for file in model.rglob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])


def _spoil_weights(model: Path) -> None:
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, file, {"format": "pt"})


def _damage_tokenizer(model: Path) -> None:
    for file in model.rglob("tokenizer.json"):
        file.write_text("{")


Reader = Callable[[Path], tuple[object, ...]]


@pytest.mark.parametrize(
    ("source", "readers", "damage", "wanted"),
    [
        ("hf", (generate, evaluate, convert_hf), _damage_weights, 2),
        ("hf", (generate, evaluate, convert_hf), _spoil_weights, 2),
        ("hf", (generate, evaluate), _damage_tokenizer, 3),
        ("run", (generate, evaluate, convert), _damage_weights, 4),
        ("run", (generate, evaluate), _damage_tokenizer, 4),
        ("run", (generate, evaluate, convert), shutil.rmtree, 4),
    ],
)
def test_an_input_that_cannot_be_read_has_the_code_of_its_kind(
    source: str,
    readers: tuple[Reader, ...],
    damage: Callable[[Path], None],
    wanted: int,
    inputs: Inputs,
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    shutil.copytree(getattr(inputs, source), model)
    damage(model)
    ends = {}
    for reader in readers:
        code, _, said = in_process(*reader(model))
        ends[reader.__name__] = code
        assert said.count("error: ") == 1, said
    assert ends == dict.fromkeys(ends, wanted)
