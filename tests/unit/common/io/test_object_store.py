"""Files of a store go and come whole, in a folder as in S3."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.errors import ConfigError, DamagedError
from nxtrain.common.io import checksummed_file
from nxtrain.common.io.checksummed_file import digest_of, verify
from nxtrain.common.io.object_store import ObjectStore, open_store
from tests.support.s3 import BUCKET, s3, s3_variables

__all__ = ["s3", "s3_variables"]


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "s3":
        request.getfixturevalue("s3")
        return open_store(f"s3://{BUCKET}/a/b")
    return open_store(str(tmp_path / "store"))


@pytest.mark.parametrize("size", [0, 1, 4096, 10_001])
def test_a_file_goes_up_and_comes_down_again(
    store: ObjectStore, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksummed_file, "BLOCK_BYTES", 4096)
    (tmp_path / "here").write_bytes(os.urandom(size))
    digest = digest_of(tmp_path / "here")
    assert (digest.num_bytes, len(digest.xxh3)) == (size, -(-size // 4096))
    store.upload("folder/name", tmp_path / "here", digest)
    store.download("folder/name", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "here").read_bytes()
    verify(tmp_path / "back", digest)


def test_a_digest_is_that_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    digest = digest_of(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"c0ntent")
    with pytest.raises(DamagedError, match="not those that were written"):
        verify(tmp_path / "file", digest)
    with pytest.raises(DamagedError, match="absent"):
        digest_of(tmp_path / "absent")


def test_what_changed_since_its_digest_is_not_uploaded(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(b"before")
    digest = digest_of(tmp_path / "here")
    (tmp_path / "here").write_bytes(b"after.")
    with pytest.raises(DamagedError, match="not those that were written"):
        store.upload("folder/name", tmp_path / "here", digest)
    assert store.sizes() == {}


def test_a_download_of_what_the_store_lacks_is_a_missing_file(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.download("folder/name", tmp_path / "back")


def test_names_below_a_folder_are_those_of_that_folder_at_any_depth(store: ObjectStore) -> None:
    for name in ("a/1", "a/x/2", "aa/3", "b/4"):
        store.put(name, name.encode())
    assert store.sizes("a") == {"a/1": 3, "a/x/2": 5}
    assert store.sizes("none") == {}
    assert {"a/1", "aa/3", "b/4"} <= store.sizes().keys()


@pytest.mark.parametrize("address", ["s3://", "s3:///", "s3:///prefix"])
def test_an_address_without_a_bucket_is_refused(s3: Any, address: str) -> None:
    with pytest.raises(ConfigError, match="names no bucket"):
        open_store(address)
