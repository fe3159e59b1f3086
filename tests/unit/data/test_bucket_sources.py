"""`nxtrain data prepare` and `inspect` give for objects of S3 what they give for the same files on a disk."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from nxtrain.cli.data import data as commands
from nxtrain.common.errors import ConfigError, DataError, StorageError
from nxtrain.common.io.bucket import BucketPath
from nxtrain.common.io.object_store import BucketSource, Location
from nxtrain.data import storage
from nxtrain.data.arrow import preparation, preparation_request, rows
from nxtrain.data.arrow.inspection import inspect_corpus
from tests.support.corpora import FORMATS, contents, documents, prepare, write_corpus, write_tokenizer
from tests.support.object_stores import BUCKET, Fault, failing_s3, object_of, s3, s3_variables
from tests.unit.data.test_resumed_preparation import KilledError, Killing

__all__ = ["s3", "s3_variables"]

ROOT = BucketPath(f"s3://{BUCKET}/src")
BUFFER = 4096


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "BATCH_BYTES", 2000)
    monkeypatch.setattr(preparation_request, "MIN_SHARD_BYTES", 0)
    in_parts(monkeypatch, BUFFER)


def in_parts(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Request a number of bytes at once, and read text in quarters of that."""
    monkeypatch.setattr(storage.open_stream, "__defaults__", (num_bytes,))
    monkeypatch.setattr(rows.split_lines, "__defaults__", (rows.MAX_DOCUMENT_BYTES, num_bytes // 4))


@pytest.fixture
def folder(s3: Any, tmp_path: Path) -> Path:
    """Every format, each in a folder of its own, with bad rows; the same files are in the bucket."""
    root = tmp_path / "src"
    for number, name in enumerate(FORMATS):
        write_corpus(root / f"{number:02}", name, documents(4 if name == "text" else 30))
    (root / "99").mkdir()
    (root / "99" / "bad.jsonl").write_bytes(b'{"text": "fine"}\n{\n{"text": ""}\n{}\n{"text": "last"}')
    (root / "99" / ".hidden.jsonl").write_bytes(b"{")
    truncated = (root / "02" / "a.jsonl.gz").read_bytes()[:-30]
    (root / "99" / "truncated.jsonl.gz").write_bytes(truncated)
    upload(s3, root)
    return root


def upload(s3: Any, root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            s3.put_object(**object_of(ROOT / path.relative_to(root).as_posix()), Body=path.read_bytes())


def parts(folder: Path) -> tuple[list[Path], list[BucketPath]]:
    """The folders, and the same prefixes."""
    names = sorted(path.name for path in folder.iterdir())
    return [folder / name for name in names], [ROOT / name for name in names]


def test_every_format_gives_the_bytes_of_a_disk_after_any_ends(folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokenizer": write_tokenizer(tmp_path / "tokenizer"), "shard_bytes": 3000}
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    files, objects = parts(folder)
    prepare(*files, out=theirs / "o.arrow", on_bad="skip", **options)
    random, ends = Random(0), 0
    while True:
        try:
            prepare(*objects, out=ours / "o.arrow", on_bad="skip", watcher=Killing(random.randint(1, 3)), **options)
            break
        except KilledError:
            ends += 1
    assert ends > 3
    wanted, actual = contents(theirs), contents(ours)
    assert actual.keys() == wanted.keys()
    for name, content in wanted.items():
        assert actual[name] == content.replace(str(folder).encode(), ROOT.encode()), name


def test_a_prefix_of_nested_objects_is_a_folder(folder: Path, s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket=BUCKET, Key="src/", Body=b"")  # as consoles mark a folder
    for only in ("*.jsonl", "*.parquet"):
        places: tuple[Location, ...] = (folder, ROOT)
        for number, source in enumerate(places):
            prepare(source, out=tmp_path / f"{only[2:]}{number}.arrow", only=only, on_bad="skip")
        result = [(tmp_path / f"{only[2:]}{number}.arrow").read_bytes() for number in range(2)]
        assert result[0] == result[1]
    with pytest.raises(DataError, match=rf"{ROOT} holds .*\.txt would be a document next to"):
        s3.put_object(**object_of(ROOT / "README.txt"), Body=b"words")
        prepare(ROOT, out=tmp_path / "o.arrow")
    with pytest.raises(ConfigError, match=f"{ROOT}-none does not exist"):
        prepare(BucketPath(f"{ROOT}-none"), out=tmp_path / "o.arrow")
    with pytest.raises(ConfigError, match=r"holds no file that matches \*\.none"):
        prepare(ROOT, out=tmp_path / "o.arrow", only="*.none")


def test_each_byte_comes_about_once_and_few_at_a_time(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a preparation therefore does not grow with an object."""
    path = write_corpus(tmp_path / "a", "a.jsonl", [text * 9 for text in documents(3000)])
    s3.put_object(**object_of(ROOT / "a.jsonl"), Body=path.read_bytes())
    read, lengths = BucketSource.read, list[int]()

    def counted(self: Any, view: memoryview, start: int) -> int:
        length = read(self, view, start)
        lengths.append(length)
        return length

    monkeypatch.setattr(BucketSource, "read", counted)
    in_parts(monkeypatch, 1 << 18)
    monkeypatch.setattr(preparation, "BATCH_BYTES", 1 << 18)
    prepare(ROOT / "a.jsonl", out=tmp_path / "o.arrow")
    size = path.stat().st_size
    assert size > 4 << 18
    assert max(lengths) <= 1 << 18
    assert sum(lengths) <= size + (1 << 17), "the look at the format, and the object once"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow", "stream.arrow"])
def test_an_object_that_changes_while_it_is_read_ends_the_command_with_its_address(
    s3: Any, tmp_path: Path, name: str
) -> None:
    random = Random(0)
    texts = [f"{number} {random.randbytes(120).hex()}" for number in range(300)]
    content = write_corpus(tmp_path / "a", name, texts).read_bytes()
    address = ROOT / name
    s3.put_object(**object_of(address), Body=content)
    assert len(content) > 6 * BUFFER

    class Changing(preparation.Watcher):
        def advance(self, num_bytes: int, counts: object) -> None:
            s3.put_object(**object_of(address), Body=content[:-1])

    with pytest.raises(DataError, match=f"{address} (has )?changed while it (is|was) read"):
        prepare(address, out=tmp_path / "o.arrow", watcher=Changing())
    assert not (tmp_path / "o.arrow").exists()


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "stream.arrow"])
def test_ranges_that_break_off_are_requested_again_or_end_the_command_which_goes_on(
    s3: Any, s3_variables: dict[str, str], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(0)
    path = write_corpus(tmp_path / "a", name, [f"{number} {random.randbytes(120).hex()}" for number in range(300)])
    address = BucketPath(ROOT / name)
    s3.put_object(**object_of(address), Body=path.read_bytes())
    prepare(path, out=tmp_path / "theirs.arrow")
    faults: list[Fault] = ["torn", "", "error", "", "torn", "error", ""]
    with failing_s3(s3_variables, lambda: faults.pop(0) if faults else "") as variables:
        monkeypatch.setenv("AWS_ENDPOINT_URL", variables["AWS_ENDPOINT_URL"])
        prepare(BucketPath(address), out=tmp_path / "ours.arrow")
        assert not faults
        faults += ["", "", "", "", "torn", "error", "torn"]
        with pytest.raises(StorageError, match=f"{address}.*start again when it does"):
            prepare(BucketPath(address), out=tmp_path / "again.arrow")
        assert not faults
        prepare(BucketPath(address), out=tmp_path / "again.arrow")
    wanted = (tmp_path / "theirs.arrow").read_bytes()
    assert (tmp_path / "ours.arrow").read_bytes() == wanted
    assert (tmp_path / "again.arrow").read_bytes() == wanted


def test_inspection_tells_of_a_bucket_what_it_tells_of_a_disk(folder: Path, s3: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    prepare(folder / "01", out=out / "text.arrow")
    prepare(folder / "01", out=out / "shards.arrow", shard_bytes=3000)
    prepare(folder / "01", out=out / "ids.arrow", tokenizer=write_tokenizer(tmp_path / "tokenizer"))
    for path in out.rglob("*"):
        if path.is_file():
            s3.upload_file(str(path), BUCKET, f"src/{path.relative_to(tmp_path)}")
    pairs: list[tuple[Path, BucketPath]] = [(folder / name, ROOT / name) for name in ("00", "03", "99", "10")]
    pairs += [(out / name, ROOT / "out" / name) for name in ("text.arrow", "shards.arrow", "ids.arrow")]
    options: dict[str, Any] = {"seq_len": 32, "cache": tmp_path / "cache"}
    for theirs, ours in pairs:
        assert inspect_corpus(ours, **options) == {**inspect_corpus(theirs, **options), "path": str(ours)}


def test_the_commands_take_addresses_and_refuse_one_for_the_output(folder: Path, tmp_path: Path) -> None:
    def call(*words: str) -> Any:
        return CliRunner().invoke(commands, [*words])

    result = call("prepare", f"{ROOT}/01", "--out", str(tmp_path / "o.arrow"))
    assert result.exit_code == 0, result.output
    prepare(folder / "01", out=tmp_path / "theirs.arrow")
    assert (tmp_path / "o.arrow").read_bytes() == (tmp_path / "theirs.arrow").read_bytes()
    assert '"documents": 30' in call("inspect", f"{ROOT}/01", "--json").output
    refused = call("prepare", f"{ROOT}/01", "--out", f"{ROOT}/o.arrow")
    assert isinstance(refused.exception, ConfigError)
    assert "add --upload" in str(refused.exception)
