"""Files in blocks: what was written is read, whatever the block's length, and no damage goes unseen."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nxtrain.common.errors import DamagedError
from nxtrain.common.io import checksummed_file, read_retry
from nxtrain.common.io.checksummed_file import ChecksummedReader, ChecksummedWriter, FileDigest, verify

BLOCK = 8192
"""A multiple of what direct access needs, and small enough that these files have many."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksummed_file, "BLOCK_BYTES", BLOCK)


@pytest.fixture(params=["direct", "cached"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if request.param == "cached":
        monkeypatch.setattr(checksummed_file, "_DIRECT", 0)
    yield tmp_path / "file"


def write(path: Path, content: bytes, piece: int = 1000) -> FileDigest:
    with ChecksummedWriter(path) as writer:
        for start in range(0, len(content), piece):
            writer.write(memoryview(content)[start : start + piece])
        return writer.close()


@pytest.mark.parametrize("size", [1, 511, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 20 * BLOCK + 77])
@pytest.mark.parametrize("piece", [1000, BLOCK, 10**6])
def test_what_is_written_is_read(path: Path, size: int, piece: int) -> None:
    content = os.urandom(size)
    stored = write(path, content, piece)
    assert path.read_bytes() == content
    assert stored.num_bytes == size
    assert len(stored.xxh3) == -(-size // BLOCK)
    with ChecksummedReader(path, stored) as reader:
        read = b"".join(bytes(view) for _, view in reader.blocks(range(len(stored.xxh3))))
    assert read == content


@pytest.mark.parametrize(("first", "shift"), [(4096, 0), (4096, 4096), (4096, 100), (77, 0), (0, 0)])
def test_memory_that_stays_is_written_from_where_it_lies_if_it_is_aligned(path: Path, first: int, shift: int) -> None:
    """Behind a header of some length, beginning at some place; a few bytes follow that are copied again."""
    size = 7 * BLOCK + 30
    memory = np.frombuffer(checksummed_file.aligned_memory(size + shift), np.uint8)[shift:]
    memory[:] = np.frombuffer(os.urandom(size), np.uint8)
    copied = list[int]()
    with ChecksummedWriter(path) as writer:
        put = writer._transfer
        address = memory.__array_interface__["data"][0]

        def transfer(block: memoryview, where: int, length: int) -> None:
            at = np.frombuffer(block, np.uint8).__array_interface__["data"][0]
            if not address <= at < address + size:
                copied.append(where)
            put(block, where, length)

        writer._transfer = transfer  # type: ignore[method-assign]
        writer.write(memoryview(b"h" * first))
        writer.write(memory.data, stays=True)
        writer.write(memoryview(b"end"))
        stored = writer.close()
    assert path.read_bytes() == b"h" * first + memory.tobytes() + b"end"
    verify(path, stored)
    if (first + shift) % 4096:
        assert len(copied) == len(stored.xxh3)
    else:
        ends = [7 * BLOCK] if first == 0 else [0, 7 * BLOCK]
        assert copied == ends


def test_only_the_blocks_that_are_asked_for_are_read_and_verified(path: Path) -> None:
    content = os.urandom(9 * BLOCK + 5)
    stored = write(path, content)
    damaged = bytearray(content)
    damaged[4 * BLOCK] ^= 1
    path.write_bytes(damaged)
    with ChecksummedReader(path, stored) as reader:
        for where, view in reader.blocks([1, 2, 7, 9]):
            assert bytes(view) == content[where : where + BLOCK]
        with pytest.raises(DamagedError, match="bytes 32,768 to 40,960 are not those that were written"):
            list(reader.blocks([3, 4, 5]))


def test_a_file_that_is_absent_shorter_or_longer_is_damaged(path: Path) -> None:
    content = os.urandom(100)
    stored = write(path, content)
    path.write_bytes(content[:-1])
    with pytest.raises(DamagedError, match="it has 99 bytes instead of 100"):
        verify(path, stored)
    path.write_bytes(content + b"x")
    with pytest.raises(DamagedError, match="it has 101 bytes instead of 100"):
        verify(path, stored)
    path.unlink()
    with pytest.raises(DamagedError, match="it is absent"):
        verify(path, stored)


def test_a_disk_that_fails_in_the_middle_fails_the_writer(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = os.pwrite

    def full(file: int, data: memoryview, where: int) -> int:
        if where >= 2 * BLOCK:
            raise OSError(28, "No space left on device")
        return put(file, data, where)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        write(path, bytes(40 * BLOCK))


def test_a_disk_that_takes_parts_of_a_block_gets_the_rest(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, where: put(file, data[:4096], where))
    content = os.urandom(3 * BLOCK + 17)
    verify(path, write(path, content))
    assert path.read_bytes() == content


def test_direct_access_that_is_refused_after_the_file_was_opened_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on some network file systems."""
    flags = os.O_WRONLY | os.O_CREAT
    probe, has_direct = checksummed_file._open(lambda more: os.open(tmp_path / "probe", flags | more))
    os.close(probe)
    if not has_direct:
        pytest.skip("this file system opens no file for direct access; runs with TMPDIR on ext4, xfs or Lustre")
    put, get, refused = os.pwrite, os.preadv, []

    def direct(file: int) -> bool:
        return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)

    def write_part(file: int, data: memoryview, where: int) -> int:
        if direct(file):
            refused.append("write")
            raise OSError(errno.EINVAL, "Invalid argument")
        return put(file, data, where)

    def read_part(file: int, views: list[memoryview], where: int) -> int:
        if direct(file):
            refused.append("read")
            raise OSError(errno.EINVAL, "Invalid argument")
        return get(file, views, where)

    monkeypatch.setattr(os, "pwrite", write_part)
    monkeypatch.setattr(os, "preadv", read_part)
    content = os.urandom(5 * BLOCK + 123)
    verify(tmp_path / "file", write(tmp_path / "file", content))
    assert (tmp_path / "file").read_bytes() == content
    assert {"write", "read"} == {*refused}


@pytest.mark.parametrize(("number", "error"), [(errno.EIO, DamagedError), (errno.ESTALE, OSError)])
def test_what_a_disk_has_lost_is_damage_and_a_lost_disk_is_not(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[Exception]
) -> None:
    stored = write(path, os.urandom(100))

    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "preadv", fail)
    monkeypatch.setattr(read_retry, "PAUSES_S", ())
    with pytest.raises(error, match=os.strerror(number)):
        verify(path, stored)
