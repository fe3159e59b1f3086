"""Files of a store go and come whole, in a folder as in a bucket of each service."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from botocore.exceptions import IncompleteReadError

from nxtrain.common.errors import BackendError, ConfigError, DamagedError, StorageError
from nxtrain.common.io import azure_blob, checksummed_file
from nxtrain.common.io import gcs as gcs_client
from nxtrain.common.io import s3 as s3_client
from nxtrain.common.io.bucket import BucketPath
from nxtrain.common.io.checksummed_file import digest_of, verify
from nxtrain.common.io.object_store import BucketSource, ObjectStore, open_store
from nxtrain.common.io.paths import listing
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

__all__ = ["azure", "azure_variables", "gcs", "gcs_variables", "s3", "s3_variables"]

PART_BYTES = 5 << 20


SERVICES = {"s3": "s3", "gs": "gcs", "az": "azure"}
"""Fixture of each scheme."""
BUCKETS = ["s3", "gs", pytest.param("az", marks=needs_azurite)]


@pytest.fixture(params=["folder", *BUCKETS])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "folder":
        return open_store(str(tmp_path / "store"))
    request.getfixturevalue(SERVICES[request.param])
    return open_store(f"{request.param}://{BUCKET}/a/b")


@pytest.fixture(params=BUCKETS)
def bucket(request: pytest.FixtureRequest) -> BucketPath:
    request.getfixturevalue(SERVICES[request.param])
    return BucketPath(f"{request.param}://{BUCKET}")


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


@pytest.mark.parametrize("size", [1, PART_BYTES - 1, 2 * PART_BYTES + 5])
def test_a_large_file_goes_up_in_parts_that_the_service_verifies(
    bucket: BucketPath, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_client, "_PART_BYTES", PART_BYTES)
    monkeypatch.setattr(azure_blob, "_PART_BYTES", PART_BYTES)
    monkeypatch.setattr(checksummed_file, "BLOCK_BYTES", 3 * PART_BYTES // 4)
    content = os.urandom(size)
    (tmp_path / "here").write_bytes(content)
    open_store(bucket).upload("large", tmp_path / "here", digest_of(tmp_path / "here"))
    assert (bucket / "large").read_bytes() == content
    view = memoryview(bytearray(size))
    assert BucketSource(bucket / "large").read(view[: size // 2], size // 3) == min(size // 2, size - size // 3)
    assert bytes(view[: size // 2]) == content[size // 3 : size // 3 + size // 2]


def test_a_small_object_whose_answer_breaks_off_is_requested_again(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = IncompleteReadError(actual_bytes=3, expected_bytes=7)
    name = BucketPath(f"s3://{BUCKET}/small")
    read = mock.Mock(side_effect=[broken, broken, b"content"])
    monkeypatch.setattr(name.service, "read", read)
    assert name.read_bytes() == b"content"
    read.side_effect = [broken] * 9
    with pytest.raises(StorageError, match=r"s3://mirror/small: 3 read, but total bytes expected is 7"):
        name.read_bytes()
    assert read.call_count == 3 + 3


def test_a_replaced_object_is_damage_and_not_a_mixture_of_versions(bucket: BucketPath) -> None:
    store, name = open_store(bucket), bucket / "x/one"
    store.put("x/one", b"first")
    source = BucketSource(name)
    store.put("x/one", b"other")
    with pytest.raises(DamagedError, match="another version has taken its place"):
        source.read(memoryview(bytearray(5)), 0)
    store.delete(["x/one", "x/absent"])
    with pytest.raises(DamagedError, match=r"absent|another version"):
        source.read(memoryview(bytearray(5)), 0)
    assert not name.is_file()


def test_objects_are_listed_and_deleted_by_several_requests(
    bucket: BucketPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_client, "_DELETE", 10)
    monkeypatch.setattr(azure_blob, "_DELETE", 10)
    store, names = open_store(bucket), [f"many/{number:03}" for number in range(25)]
    for name in names:
        store.put(name, b"x")
    assert store.sizes("many") == dict.fromkeys(names, 1)
    store.delete(names)
    assert store.sizes("many") == {}


def test_an_absent_bucket_is_named_with_the_command_that_lists_it(bucket: BucketPath) -> None:
    absent = f"{bucket.partition('://')[0]}://absent-{BUCKET}"
    with pytest.raises(BackendError, match=re.escape(listing(f"{absent}/"))):
        open_store(absent).sizes()
    with pytest.raises(BackendError, match=re.escape(absent)):
        open_store(absent).put("a", b"x")


def test_a_pickled_address_opens_a_client_of_its_own(bucket: BucketPath) -> None:
    open_store(bucket).put("a", b"x")
    again = pickle.loads(pickle.dumps(bucket / "a"))
    assert again == bucket / "a" and again._service is None
    assert again.read_bytes() == b"x"


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize("rest", ["", "/", "/prefix"])
def test_an_address_without_a_bucket_is_refused(scheme: str, rest: str) -> None:
    address = f"{scheme}://{rest}"
    with pytest.raises(ConfigError, match="names no bucket"):
        open_store(address)
