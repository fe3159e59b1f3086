"""A copy of a prepared corpus in S3 has its bytes, is made once, and replaces no other corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.errors import ConfigError
from nxtrain.common.io.bucket import BucketPath
from nxtrain.common.io.object_store import BucketStore
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.upload import upload
from nxtrain.data.arrow.work import Outputs
from tests.support.corpora import documents, prepare, write_corpus
from tests.support.object_stores import BUCKET, object_of, s3, s3_variables

__all__ = ["s3", "s3_variables"]

ROOT = BucketPath(f"s3://{BUCKET}/corpora/one")


def prepared(folder: Path, number: int, **options: Any) -> Outputs:
    """A finished preparation with a bad row."""
    folder.mkdir()
    source = write_corpus(folder, "a.jsonl", documents(number))
    with source.open("ab") as file:
        file.write(b"{}\n")
    return prepare(source, out=folder / "o.arrow", on_bad="skip", **options).outputs


@pytest.mark.parametrize("shard_bytes", [0, 1 << 16])
def test_a_copy_is_read_as_the_file_is(s3: Any, tmp_path: Path, shard_bytes: int) -> None:
    outputs = prepared(tmp_path / "here", 3000, shard_bytes=shard_bytes)
    assert upload(outputs, ROOT)
    here, there = PreparedCorpus(outputs.out), PreparedCorpus(ROOT / "o.arrow", tmp_path / "cache")
    assert there.identity == here.identity
    assert [there.text(number) for number in range(len(there))] == documents(3000)
    files = [path for path in outputs.out.parent.rglob("*") if path.is_file() and path.name != "a.jsonl"]
    assert {path.relative_to(outputs.out.parent).as_posix() for path in files} == BucketStore(ROOT).sizes().keys()
    for path in files:
        address = ROOT / path.relative_to(outputs.out.parent).as_posix()
        assert s3.get_object(**object_of(address))["Body"].read() == path.read_bytes()
    assert len(files) == (3 if not shard_bytes else 2 + len([*outputs.out.iterdir()]))


def test_a_copy_is_made_once_and_again_after_a_break(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = prepared(tmp_path / "here", 30)
    with monkeypatch.context() as broken:
        broken.setattr(BucketStore, "put", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            upload(outputs, ROOT)
    assert outputs.summary.name not in BucketStore(ROOT).sizes(), "the summary goes last"
    assert upload(outputs, ROOT)
    monkeypatch.setattr(BucketStore, "upload", None)
    assert not upload(outputs, ROOT)


def test_another_corpus_is_not_replaced(s3: Any, tmp_path: Path) -> None:
    upload(prepared(tmp_path / "one", 30), ROOT)
    before = BucketStore(ROOT).sizes()
    with pytest.raises(ConfigError, match="is of another corpus"):
        upload(prepared(tmp_path / "two", 31), ROOT)
    assert BucketStore(ROOT).sizes() == before
