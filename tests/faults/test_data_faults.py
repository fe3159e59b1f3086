"""Data that fails or changes under a run ends it with the place, or changes nothing; never a batch of anything else.

Batches of token files are read ahead by a thread of each rank; tests/faults/test_worker_faults.py has the workers of
prepared corpora. A thread that hangs is named by the watchdog, as tests/faults/test_hangs.py shows. The reference is
the run that nobody disturbed.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxtrain.common.errors import DataError, StorageError
from nxtrain.data import dataset
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.launch.exit_codes import FINAL
from tests.support.commands import at_batch, command, train, trained, write_config
from tests.support.run_folders import SPECIAL_KINDS, put
from tests.support.runs import course

STEPS = 12


@pytest.mark.parametrize(
    ("kind", "ends_with", "says"),
    [
        ("kill", -signal.SIGKILL, "fires in step 7"),
        ("raise", 1, "InjectedError: injected failure"),
        ("oom", 1, "MemoryError: injected"),
    ],
)
def test_a_run_whose_reader_fails_goes_on_at_the_next_start(
    tmp_path: Path, straight: list[dict[str, Any]], kind: str, ends_with: int, says: str
) -> None:
    write_config(tmp_path, steps=STEPS)
    armed = f"{kind}@0:7:data"
    output = trained(tmp_path, armed=armed, code=ends_with)
    assert says in output
    assert len(course(tmp_path / "run")) <= 6
    trained(tmp_path, armed=armed)
    assert course(tmp_path / "run") == straight


def _fail_to_read(path: Path) -> None:
    read = os.preadv

    def fail(file: int, *rest: Any) -> int:
        if os.readlink(f"/proc/self/fd/{file}") == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(file, *rest)

    vars(os)["preadv"] = fail


def test_storage_that_fails_under_a_reader_is_tried_again_by_the_launcher(
    tmp_path: Path, straight: list[dict[str, Any]]
) -> None:
    write_config(tmp_path, steps=STEPS)
    fail = partial(_fail_to_read, (tmp_path / "rows.npy").resolve())
    code, output = train(tmp_path, first=partial(at_batch, 7, fail))
    assert code == StorageError.exit_code, output
    assert code not in FINAL
    assert f"{tmp_path}/rows.npy, row " in output
    assert "cannot be read: Input/output error. Start again when the storage is back" in output
    assert "Traceback" not in output
    trained(tmp_path)
    assert course(tmp_path / "run") == straight


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _write_beyond_vocabulary(path: Path) -> None:
    ids = np.load(path, mmap_mode="r+")
    ids[11, 3] = 60_000
    ids.flush()


def _write_other_ids(path: Path) -> None:
    ids = np.load(path, mmap_mode="r+")
    ids[:] = ids[::-1].copy()
    ids.flush()


def _replace(path: Path) -> None:
    other = path.with_name("other.npy")
    np.save(other, np.zeros_like(np.load(path)))
    other.replace(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_truncate, "is no longer there: the file is shorter"),
        (_write_beyond_vocabulary, "rows.npy, row 11, column 3: id 60000 is outside of the vocabulary"),
        (_write_other_ids, "rows.npy does not hold what was checked when the run began"),
    ],
)
def test_a_token_file_that_changes_under_a_run_ends_it_with_the_place(
    tmp_path: Path, straight: list[dict[str, Any]], change: Callable[[Path], object], says: str
) -> None:
    write_config(tmp_path, steps=STEPS)
    rows = tmp_path / "rows.npy"
    before = rows.read_bytes()
    # A checkpoint that is still being written when the run ends would let the next start begin anew.
    output = trained(
        tmp_path, "checkpoint.async=false", first=partial(at_batch, 7, partial(change, rows)), code=DataError.exit_code
    )
    assert says in output
    assert "Traceback" not in output
    done = course(tmp_path / "run")
    assert done == straight[: len(done)], "no batch of anything else"
    assert len(done) <= 6
    code, output = train(tmp_path)
    assert code != 0, "the file is still not what it was"
    rows.write_bytes(before)
    trained(tmp_path)
    assert course(tmp_path / "run") == straight


@pytest.mark.parametrize("change", [Path.unlink, _replace])
def test_a_token_file_that_vanishes_or_is_replaced_under_its_name_is_read_on_as_it_was(
    tmp_path: Path, straight: list[dict[str, Any]], change: Callable[[Path], object]
) -> None:
    write_config(tmp_path, steps=STEPS)
    trained(tmp_path, first=partial(at_batch, 7, partial(change, tmp_path / "rows.npy")))
    assert course(tmp_path / "run") == straight
    code, output = train(tmp_path, "train.steps=14", "optim.decay_steps=12")
    assert code == (DataError.exit_code if change is Path.unlink else 4), output
    assert "rows.npy cannot be read: No such file" in output or "data" in output


def _after_the_check(change: Callable[[Path], object], path: Path) -> None:
    checked = vars(dataset)["prepare_tokens"]

    def and_changed(*args: Any, **kwargs: Any) -> Any:
        prepared = checked(*args, **kwargs)
        change(path)
        return prepared

    vars(dataset)["prepare_tokens"] = and_changed


@pytest.mark.parametrize("change", [Path.unlink, _replace, _truncate])
def test_a_token_file_that_changes_between_its_check_and_its_use_is_refused(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    write_config(tmp_path, steps=STEPS)
    output = trained(tmp_path, first=partial(_after_the_check, change, tmp_path / "rows.npy"), code=DataError.exit_code)
    assert str(tmp_path / "rows.npy") in output
    assert "Traceback" not in output


TEXT = ("model.config.vocab_size=300", "data.source=text", "data.validation_fraction=0.1", "train.steps=4")


def write_text(folder: Path) -> tuple[str, ...]:
    """A run on text, whose overrides it returns."""
    write_config(folder)
    words = np.random.default_rng(0)
    (folder / "text").mkdir()
    for number in range(20):
        text = " ".join(words.choice(["alpha", "beta", "gamma", "delta"], size=60))
        (folder / f"text/{number:02}.txt").write_text(f"{number}: {text}\n", encoding="utf-8")
    return (*TEXT, f"data.path={folder}/text")


def _before(module_name: str, name: str, action: Callable[[], object]) -> None:
    """Do something before a function of a module of `nxtrain.data.arrow` is called."""
    module = import_module(f"nxtrain.data.arrow.{module_name}")
    function = vars(module)[name]

    def called(*args: Any, **kwargs: Any) -> Any:
        action()
        return function(*args, **kwargs)

    setattr(module, name, called)


def _rewrite(path: Path) -> None:
    path.write_text("other words\n", encoding="utf-8")


def _empty(path: Path) -> None:
    path.write_text("", encoding="utf-8")


@pytest.mark.parametrize("number", [7, 19])
@pytest.mark.parametrize("change", [Path.unlink, _rewrite, _empty])
def test_a_corpus_that_changes_while_it_is_read_is_refused_with_the_file(
    tmp_path: Path, number: int, change: Callable[[Path], object]
) -> None:
    overrides = write_text(tmp_path)
    file = tmp_path / f"text/{number:02}.txt"
    first = partial(_before, "preparation", "source_rows", partial(change, file))
    output = trained(tmp_path, *overrides, first=first, code=DataError.exit_code)
    assert str(file) in output
    assert "Traceback" not in output
    assert not [*(tmp_path / "run/data").glob("*-*"), *(tmp_path / "run/data").glob(".*")]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"good\n\xff bad\n", "07.txt, row 1: invalid UTF-8: byte 5 is 0xff"),
        (b"", ""),
        (b"a", ""),
        (b"long words without any end " * 40_000, ""),
    ],
)
def test_odd_documents_are_named_or_read(tmp_path: Path, content: bytes, says: str) -> None:
    overrides = write_text(tmp_path)
    (tmp_path / "text/07.txt").write_bytes(content)
    code, output = train(tmp_path, *overrides)
    assert code == (DataError.exit_code if says else 0), output
    assert says in " ".join(output.split())


def _kill_in(attribute: str) -> None:
    """End this process, with no time to tidy, once a prepared file is written but for its end."""

    def killed(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, attribute, killed)


def prepared(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "run/data").iterdir() if path.suffix != ".json"}


def test_preparation_that_was_killed_begins_again_and_leaves_nothing_behind(tmp_path: Path) -> None:
    overrides = write_text(tmp_path)
    trained(tmp_path, *overrides, f"run.dir={tmp_path}/straight")
    data = tmp_path / "run/data"
    for function, call in (
        ("prepare_sources", "fdatasync"),
        ("_write_validation", "fsync"),
        ("_write_training", "fsync"),
    ):
        code, output = train(
            tmp_path, *overrides, first=partial(_before, "training", function, partial(_kill_in, call))
        )
        assert code == -signal.SIGKILL, output
        assert [*data.glob(".*"), *data.glob("*.partial")], "the test kills too late"
        assert not [*data.glob("train-*.arrow")]
    trained(tmp_path, *overrides)
    assert course(tmp_path / "run") == course(tmp_path / "straight")
    (tmp_path / "again").mkdir()
    (tmp_path / "straight").rename(tmp_path / "again/run")
    assert prepared(tmp_path) == prepared(tmp_path / "again")
    names = {path.name for path in (tmp_path / "run/data").iterdir()}
    assert names == {path.name for path in (tmp_path / "again/run/data").iterdir()}


@pytest.mark.parametrize("name", ["train-*.arrow", "corpus-*.arrow"])
def test_a_prepared_file_that_was_cut_short_is_made_anew(tmp_path: Path, name: str) -> None:
    overrides = write_text(tmp_path)
    assert train(tmp_path, *overrides)[0] == 0
    before, done = prepared(tmp_path), course(tmp_path / "run")
    (file,) = (tmp_path / "run/data").glob(name)
    _truncate(file)
    trained(tmp_path, *overrides, "checkpoint.resume=never")
    assert prepared(tmp_path) == before
    assert course(tmp_path / "run") == done


@pytest.mark.parametrize("side", ["train", "validation"])
def test_a_bit_of_a_prepared_file_that_has_changed_is_not_trained_on(tmp_path: Path, side: str) -> None:
    """The id stays inside of the vocabulary, so that nothing else could tell."""
    overrides = (*write_text(tmp_path), "train.eval_every=2")
    assert train(tmp_path, *overrides)[0] == 0
    before, done = prepared(tmp_path), course(tmp_path / "run")
    (file,) = (tmp_path / "run/data").glob(f"{side}-*.arrow")
    content = bytearray(file.read_bytes())
    content[content.index(PreparedCorpus(file).values(0, 32))] ^= 1
    file.write_bytes(content)
    output = trained(tmp_path, *overrides, "checkpoint.resume=never", code=DataError.exit_code)
    output = "".join(output.split())
    assert f"{file}isdamaged:bytes0to" in output
    assert "deleteit,andthenextstartwritesitagain" in output
    assert "Traceback" not in output
    file.unlink()
    trained(tmp_path, *overrides, "checkpoint.resume=never")
    assert prepared(tmp_path) == before
    assert course(tmp_path / "run") == done


def test_a_folder_that_cannot_be_entered_ends_the_start(tmp_path: Path) -> None:
    overrides = write_text(tmp_path)
    (tmp_path / "text/more").mkdir()
    (tmp_path / "text/more/a.txt").write_text("words " * 50, encoding="utf-8")
    output = trained(tmp_path, *overrides, first=partial(_shut, tmp_path / "text/more"), code=DataError.exit_code)
    output = " ".join(output.split())
    assert "1 of its folders and files cannot be read" in output
    assert "text/more: Permission denied" in output
    assert "Traceback" not in output


def _shut(folder: Path) -> None:
    """Keep this process out of a folder; rights would not, if it is root's."""
    listed = os.listdir

    def refuse(path: Any = ".") -> list[str]:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return listed(path)

    vars(os)["listdir"] = refuse


@pytest.mark.parametrize("kind", SPECIAL_KINDS)
def test_a_file_of_ranks_that_is_none_is_damage_and_holds_nobody_up(
    tmp_path: Path, straight: list[dict[str, Any]], kind: str
) -> None:
    write_config(tmp_path, steps=STEPS)
    trained(tmp_path)
    put(tmp_path / "run/checkpoints/step-00000012/rank-00000.safetensors", kind)
    output = trained(tmp_path)
    output = " ".join(output.split())
    assert f"it is {kind}, not a regular file; the checkpoint is put aside as step-00000012.corrupt" in output
    assert course(tmp_path / "run") == straight


@pytest.mark.parametrize(
    "kind", ["a FIFO", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("a socket", "a device"))]
)
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "manifest.json", "tokenizer.json", "meta.json"])
def test_generation_waits_for_no_file_that_is_none(tmp_path: Path, name: str, kind: str) -> None:
    overrides = write_text(tmp_path)
    folder = tmp_path / "run/checkpoints/step-00000004"
    assert train(tmp_path, *overrides)[0] == 0
    put(folder / name, kind)
    code, output = command(tmp_path, "generate", folder, "--prompt", "alpha", "--max-new-tokens", "2")
    assert code in {2, 4}, output
    assert name in output
    assert "Traceback" not in output
