"""Data sets of the Hub become corpora: the files that are chosen, of the commit that the first start took."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nxtrain.cli import main as cli
from nxtrain.common.errors import ConfigError, DataError, StoppedBySignal
from nxtrain.data.arrow.columns import ORIGIN_KEY
from nxtrain.data.arrow.hub_files import HubAddress
from nxtrain.data.arrow.preparation import Watcher
from nxtrain.data.arrow.work import Counts
from tests.support.corpora import documents, json_lines, prepare, table, texts_of, write_tokenizer
from tests.support.hub import Hub, hub

__all__ = ["hub"]

ADDRESS = HubAddress.parse("hf://acme/texts")


def parquet(texts: Iterable[str]) -> bytes:
    out = io.BytesIO()
    pq.write_table(table([*texts]), out)
    return out.getvalue()


TEXTS = documents(40)
FILES = {
    ".gitattributes": b"*",
    "README.md": b"words about the data",
    "data/b.jsonl": json_lines(TEXTS[20:]),
    "data/a.parquet": parquet(TEXTS[:20]),
    "data/deep/c.txt": b"the last text",
    "dataset_infos.json": b"{}",
}


def add(hub: Hub, files: dict[str, bytes] | None = None) -> str:
    return hub.add("acme/texts", files or FILES, kind="datasets")


def origin(path: Path) -> list[str]:
    with pa.memory_map(str(path)) as mapped:
        metadata = pa.ipc.open_file(mapped).schema.metadata
    result: list[str] = json.loads(metadata.get(ORIGIN_KEY, b"[]"))
    return result


@pytest.mark.parametrize(
    ("text", "repository", "pattern", "revision"),
    [
        ("hf://acme/texts", "acme/texts", "", ""),
        ("hf://acme/texts/data/*.parquet@v1", "acme/texts", "data/*.parquet", "v1"),
        ("hf://datasets/acme/texts/data/@refs/convert/parquet", "acme/texts", "data", "refs/convert/parquet"),
    ],
)
def test_an_address_names_a_data_set_and_its_files(text: str, repository: str, pattern: str, revision: str) -> None:
    result = HubAddress.parse(text)
    assert (result.name.repository, result.pattern, result.name.revision) == (repository, pattern, revision)
    assert result.name.kind == "dataset"
    assert HubAddress.parse(f"{result}") == result


@pytest.mark.parametrize("text", ["hf://", "hf://texts", "hf://acme/texts@", "hf:///acme/texts"])
def test_an_address_without_a_data_set_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no files of a data set"):
        HubAddress.parse(text)


@pytest.mark.parametrize(
    ("pattern", "only", "chosen"),
    [
        ("", "", ["data/a.parquet", "data/b.jsonl", "data/deep/c.txt"]),
        ("", "*.jsonl", ["data/b.jsonl"]),
        ("/data/*", "", ["data/a.parquet", "data/b.jsonl"]),
        ("/data", "*.txt", ["data/deep/c.txt"]),
        ("/**/*.txt", "", ["data/deep/c.txt"]),
        ("/**/?.[j]sonl", "", []),
        ("/data/a.parquet", "", ["data/a.parquet"]),
        ("/README.md", "", ["README.md"]),
    ],
)
def test_a_pattern_chooses_the_files_that_come(hub: Hub, pattern: str, only: str, chosen: list[str]) -> None:
    add(hub)
    address = HubAddress.parse(f"hf://acme/texts{pattern}")
    if not chosen:
        with pytest.raises(ConfigError, match="has no file that matches"):
            address.fetch(only, (), lambda line: None)
    else:
        assert [*address.fetch(only, (), lambda line: None).files] == chosen
    assert sorted(hub.fetched()) == sorted(Path(file).name for file in chosen)


def test_a_corpus_of_the_hub_is_that_of_its_files_and_names_the_commit(hub: Hub, tmp_path: Path) -> None:
    sha = add(hub)
    address = HubAddress.parse("hf://acme/texts/data/*")
    outcome = prepare(address, out=tmp_path / "o.arrow")
    assert texts_of(tmp_path / "o.arrow") == TEXTS
    assert origin(tmp_path / "o.arrow") == [f"hf://acme/texts/data/*@{sha}"]
    assert json.loads(outcome.summary["origin"]) == origin(tmp_path / "o.arrow")

    add(hub, {"data/other.jsonl": json_lines(["newer"])})
    assert not prepare(address, out=tmp_path / "o.arrow").is_new
    prepare(address, out=tmp_path / "o.arrow", restart=True)
    assert texts_of(tmp_path / "o.arrow") == ["newer"]

    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "x.jsonl").write_bytes(json_lines(TEXTS))
    prepare(folder, out=tmp_path / "local.arrow")
    assert origin(tmp_path / "local.arrow") == []


def test_an_interrupted_preparation_goes_on_with_its_commit(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopping(Watcher):
        def __init__(self) -> None:
            self.written = 0

        def advance(self, num_bytes: int, counts: Counts) -> None:
            self.written = counts.documents

        def asked_to_stop(self) -> str:
            return "SIGTERM"

    monkeypatch.setattr("nxtrain.data.arrow.preparation.BATCH_ROWS", 10)
    sha = add(hub, {"data/a.jsonl": json_lines(TEXTS)})
    watcher = Stopping()
    with pytest.raises(StoppedBySignal):
        prepare(ADDRESS, out=tmp_path / "o.arrow", watcher=watcher)
    assert watcher.written == 10
    newer = add(hub, {"data/a.jsonl": json_lines(["newer"])})
    prepare(ADDRESS, out=tmp_path / "o.arrow")
    assert texts_of(tmp_path / "o.arrow") == TEXTS
    assert origin(tmp_path / "o.arrow") == [f"hf://acme/texts@{sha}"]
    named = HubAddress.parse(f"hf://acme/texts@{newer}")
    with pytest.raises(DataError, match="the commits of the Hub differ"):
        prepare(named, out=tmp_path / "o.arrow")


def test_bad_rows_are_treated_as_in_other_files(hub: Hub, tmp_path: Path) -> None:
    add(hub, {"a.jsonl": b'{"text": "good"}\nbad\n{"other": 1}\n'})
    with pytest.raises(DataError, match=r"a\.jsonl, row 2"):
        prepare(ADDRESS, out=tmp_path / "o.arrow")
    outcome = prepare(ADDRESS, out=tmp_path / "o.arrow", on_bad="skip")
    assert (texts_of(tmp_path / "o.arrow"), sum(outcome.summary["skipped"].values())) == (["good"], 2)


def test_files_of_several_splits_are_chosen_by_a_pattern(hub: Hub, tmp_path: Path) -> None:
    names = ("train-00000-of-00002", "test-00000-of-00001", "contest")
    sha = add(hub, {f"data/{name}.jsonl": json_lines([name]) for name in names})
    with pytest.raises(DataError, match="has files of several splits") as caught:
        prepare(ADDRESS, out=tmp_path / "o.arrow")
    (chosen,) = [word for word in str(caught.value).split() if word.startswith("hf://acme/texts/")]
    assert chosen == f"hf://acme/texts/data/train*@{sha}"
    assert hub.fetched() == []
    prepare(HubAddress.parse(chosen), out=tmp_path / "o.arrow")
    assert texts_of(tmp_path / "o.arrow") == ["train-00000-of-00002"]


def test_the_command_takes_data_and_tokenizer_of_the_hub(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sha = add(hub)
    folder = write_tokenizer(tmp_path / "tokenizer")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.add("acme/tiny", {**files, "model.safetensors": b"0" * 2000})

    def run(*argv: str) -> tuple[object, str]:
        monkeypatch.setattr("sys.argv", ["nxtrain", "data", "prepare", *argv])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, " ".join(capsys.readouterr().err.split())

    code, said = run("hf://acme/texts/data/*", "--out", "o.arrow", "--tokenizer", "acme/tiny")
    assert code == 0, said
    assert f"fetches data/a.parquet, data/b.jsonl of acme/texts@{sha}" in said
    assert "model.safetensors" not in hub.fetched()
    prepare(HubAddress.parse("hf://acme/texts/data/*"), out=tmp_path / "same.arrow", tokenizer=folder)
    assert (tmp_path / "o.arrow").read_bytes() == (tmp_path / "same.arrow").read_bytes()
    code, said = run("hf://acme/text", "--out", "p.arrow")
    assert (code, "the Hub has no dataset acme/text" in said) == (2, True), said
