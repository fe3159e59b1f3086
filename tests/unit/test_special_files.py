"""A FIFO, a socket or a device in the place of a file ends in an error that names it, wherever a file is read."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nxtrain.checkpoint import rewinds
from nxtrain.checkpoint.convert.hf_folder import HfFolder
from nxtrain.checkpoint.convert.nxd_files import open_file
from nxtrain.checkpoint.manifest import read_manifest
from nxtrain.checkpoint.meta import read_meta
from nxtrain.common.errors import CheckpointError, ConfigError, DamagedError, DataError, NxtrainError
from nxtrain.common.io import jsonl
from nxtrain.common.io.checksummed_file import FileSource
from nxtrain.common.io.regular import NotRegularError, open_regular, read_bytes, read_text, require_regular
from nxtrain.config.check import resolve_config
from nxtrain.config.load import load
from nxtrain.config.schema import DataConfig
from nxtrain.data.arrow.preparation import Watcher, prepare_corpus
from nxtrain.data.arrow.preparation_request import PreparationRequest
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.training import prepare_corpora
from nxtrain.data.prepare import prepare_tokens
from nxtrain.data.samples import FileSamples
from nxtrain.data.storage import open_file as open_data_file
from nxtrain.data.tokenization import declared_end, load_tokenizer
from nxtrain.tools.compile.manifest import read_manifest as read_graphs
from tests.support.run_folders import SPECIAL_KINDS, in_time, put


@pytest.mark.parametrize("kind", SPECIAL_KINDS)
@pytest.mark.parametrize("read", [open_regular, read_bytes, read_text, require_regular])
def test_only_regular_files_are_read(tmp_path: Path, kind: str, read: Callable[[Path], object]) -> None:
    put(tmp_path / "file", kind)
    with pytest.raises(NotRegularError) as refused:
        in_time(lambda: read(tmp_path / "file"))
    assert refused.value.strerror == f"it is {kind}, not a regular file"


def test_what_takes_the_place_of_a_file_before_it_is_opened_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "file", "a FIFO")
    (tmp_path / "before").touch()
    regular = os.stat(tmp_path / "before")
    open_files = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch, pytest.raises(NotRegularError):
        patch.setattr(os, "stat", lambda path: regular)
        in_time(lambda: open_regular(tmp_path / "file"))
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_links_to_files_are_followed_and_folders_are_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a\r\nb")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "link") == b"a\r\nb"
    assert read_text(tmp_path / "link") == "a\nb"
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    with pytest.raises(FileNotFoundError) as missing:
        read_bytes(tmp_path / "absent")
    assert missing.value.errno == errno.ENOENT


def _text(path: Path) -> object:
    config = DataConfig(source="text", path=str(path))
    return prepare_corpora(config, 8, 300, path.parent / "work")


def _arrow(path: Path) -> object:
    return prepare_corpus(PreparationRequest([path], path.parent / "o.arrow"), Watcher())


def _hf(path: Path) -> object:
    return HfFolder(path.parent)


def _hf_shape(path: Path) -> object:
    (path.parent / "empty.toml").touch()
    return resolve_config(load(path.parent / "empty.toml", [f"model.hf={path.parent}"]), None)


def _samples(path: Path) -> object:
    return FileSamples(open_data_file(path, Path()), seq_len=8, vocab_size=300, expected="")


def _tokenizer(path: Path) -> object:
    return load_tokenizer(path, 300)


def _tokens(path: Path) -> object:
    config = DataConfig(source="tokens", path=str(path))
    return prepare_tokens(config, 8, 300)


def _below(read: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: read(path.parent)


READERS: list[tuple[str, Callable[[Path], object], type[Exception]]] = [
    ("run.toml", load, ConfigError),
    ("config.json", _hf, ConfigError),
    ("config.json", _hf_shape, ConfigError),
    ("model.safetensors", _hf, ConfigError),
    ("model.safetensors.index.json", _hf, ConfigError),
    ("rows.npy", _samples, DataError),
    ("rows.npy", _tokens, DataError),
    ("rows.arrow", PreparedCorpus, DataError),
    ("text", _text, DataError),
    ("text", _arrow, DataError),
    ("tokenizer.json", _tokenizer, DataError),
    ("tokenizer_config.json", lambda path: declared_end(path.with_name("tokenizer.json")), DataError),
    ("rank-00000.safetensors", FileSource, DamagedError),
    ("manifest.json", _below(read_manifest), DamagedError),
    ("meta.json", _below(read_meta), CheckpointError),
    (rewinds.FILE, _below(rewinds.read), DamagedError),
    ("dp_rank_00_tp_rank_00_pp_rank_00.pt", open_file, CheckpointError),
    ("graphs.json", read_graphs, ConfigError),
    ("metrics.jsonl", jsonl.read, NotRegularError),
]


@pytest.mark.parametrize("kind", SPECIAL_KINDS)
@pytest.mark.parametrize(
    ("name", "read", "error"), READERS, ids=[f"{name}-{n}" for n, (name, *_) in enumerate(READERS)]
)
def test_every_reader_refuses_what_is_no_regular_file(
    tmp_path: Path, kind: str, name: str, read: Callable[[Path], object], error: type[Exception]
) -> None:
    if name.startswith("model.safetensors"):
        (tmp_path / "config.json").write_text("{}")
    put(tmp_path / name, kind)
    with pytest.raises(error) as refused:
        in_time(lambda: read(tmp_path / name))
    assert name in str(refused.value)
    assert "not a regular file" in str(refused.value)


def test_a_weight_file_of_hugging_face_that_becomes_a_fifo_is_refused_as_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    folder = HfFolder(tmp_path)
    put(tmp_path / "model.safetensors", "a FIFO")
    with pytest.raises(NotRegularError):
        in_time(lambda: folder.read("w"))


@pytest.mark.parametrize("kind", SPECIAL_KINDS)
@pytest.mark.parametrize("name", ["b.txt", "deep/b", "deep/deeper/b.jsonl"])
@pytest.mark.parametrize("pattern", ["", "/**", "/**/b*"])
@pytest.mark.parametrize("read", [_text, _arrow])
def test_a_folder_with_what_is_no_file_is_refused(
    tmp_path: Path, kind: str, name: str, pattern: str, read: Callable[[Path], object]
) -> None:
    folder = tmp_path / "text"
    (folder / name).parent.mkdir(parents=True)
    (folder / "a.txt").write_text("some words " * 40)
    put(folder / name, kind)
    given = Path(f"{folder}{pattern}") if read is _text else folder
    with pytest.raises(DataError) as refused:
        in_time(lambda: read(given))
    assert f"{folder}/{name}: it is {kind}, not a regular file" in str(refused.value)
    (folder / name).unlink()
    assert in_time(lambda: read(folder))


def test_a_refusal_is_an_error_for_people() -> None:
    assert all(issubclass(error, NxtrainError) for *_, error in READERS if error is not NotRegularError)
