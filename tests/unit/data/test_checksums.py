"""Prepared tokens: a single bit that changes on the disk is found before it is trained on, whenever it changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from nxtrain.common.errors import DataError
from nxtrain.data import checksums as checksums_module
from nxtrain.data.arrow import seal, work
from nxtrain.data.checksums import Checksums, Summing, checksums_of
from nxtrain.data.files import read_array, read_checksums, writing_tokens
from nxtrain.data.packing import concat
from nxtrain.data.samples import FileSamples, probe
from nxtrain.data.storage import LocalFile
from tests.unit.data.conftest import OpenAlone

BLOCK = 256
SEQ_LEN = 24
VOCAB = 60_000


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checksums_module, seal, work):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)


def written(path: Path, num_tokens: int, dtype: type = np.uint16) -> NDArray[np.int64]:
    ids = np.random.default_rng(num_tokens).integers(0, VOCAB, num_tokens)
    with writing_tokens(path, dtype) as append:
        for piece in np.array_split(ids, 7):
            append(piece)
    return ids


def opened(path: Path, expected: str | None = None) -> FileSamples:
    expected = expected or probe(concat(read_array(path), SEQ_LEN))
    checksums = read_checksums(path)
    file = LocalFile(path)
    return FileSamples(file, seq_len=SEQ_LEN, vocab_size=VOCAB, expected=expected, checksums=checksums)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
@pytest.mark.parametrize("num_tokens", [25, 127, 128, 129, 1000, 4096])
def test_rows_are_those_of_the_file_in_any_order(tmp_path: Path, num_tokens: int, dtype: type) -> None:
    ids = written(tmp_path / "ids.npy", num_tokens, dtype)
    samples, rows = opened(tmp_path / "ids.npy"), concat(ids, SEQ_LEN)
    assert samples.num_rows == len(rows)
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(rows)), 2))
        np.testing.assert_array_equal(samples.rows(order), rows[order])


def flip(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


PLACES = [0, 6, 20, 70, 127, 128, 129, 128 + BLOCK, 128 + 5 * BLOCK + 3, -BLOCK, -1]


@pytest.mark.parametrize("place", PLACES)
def test_a_bit_that_changed_between_two_starts_is_found(tmp_path: Path, place: int) -> None:
    """Also where the sample of rows that a start compares is taken from what the disk holds now."""
    path = tmp_path / "ids.npy"
    rows = concat(written(path, 170 * SEQ_LEN + 1), SEQ_LEN)
    before = probe(rows)
    flip(path, place)
    found = 0
    with pytest.raises(DataError) as refused:
        try:
            now = probe(concat(read_array(path), SEQ_LEN))
        except DataError:  # numpy knows the file no more, and a start prepares it anew
            now = before
        samples = opened(path, now)
        for row in range(samples.num_rows):
            np.testing.assert_array_equal(samples.rows(np.array([row]))[0], rows[row])
            found += 1
    assert str(path) in str(refused.value)
    assert found < len(rows)


@pytest.mark.parametrize(("num_tokens", "row"), [(4097, 70), (SEQ_LEN + 1, 0)])
def test_a_bit_that_changes_while_the_file_is_read_is_found(tmp_path: Path, num_tokens: int, row: int) -> None:
    """Also in a file of one block, which was read last."""
    path = tmp_path / "ids.npy"
    written(path, num_tokens)
    samples = opened(path)
    samples.rows(np.array([row]))
    start = 128 + row * SEQ_LEN * 2
    with path.open("r+b") as file:
        file.seek(start)
        byte = file.read(1)[0]
        file.seek(start)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(DataError, match=r"ids\.npy is damaged: bytes .* of its ids are not what was written"):
        samples.rows(np.array([row]))


def test_the_message_names_the_file_and_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "ids.npy"
    written(path, 4097)
    flip(path, 128 + 3 * BLOCK)
    with pytest.raises(DataError) as refused:
        opened(path).rows(np.arange(40))
    assert str(refused.value) == (
        f"{path} is damaged: bytes 768 to 1,024 of its ids are not what was written when the data was prepared; delete "
        "it, and the next start prepares it again"
    )


@pytest.mark.parametrize("piece", [1, 100, BLOCK, BLOCK + 1, 10**6])
def test_checksums_do_not_depend_on_the_pieces(piece: int) -> None:
    content = np.random.default_rng(0).bytes(10 * BLOCK + 77)
    whole, parts = Summing(), Summing()
    whole.add(memoryview(content))
    for start in range(0, len(content), piece):
        parts.add(memoryview(content)[start : start + piece])
    one, other = whole.finish(b"head"), parts.finish(b"head")
    assert one.sealed() == other.sealed()
    assert one.num_bytes == len(content)
    assert len(one.blocks) == 11


def test_checksums_come_back_as_they_were_and_any_change_of_their_file_is_found() -> None:
    summing = Summing()
    summing.add(memoryview(bytes(range(256)) * 3))
    sealed = summing.finish(b"head").sealed()
    assert Checksums.of(sealed).sealed() == sealed
    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 16
        with pytest.raises(ValueError, match="not those that were written"):
            Checksums.of(bytes(changed))
    for length in range(len(sealed)):
        with pytest.raises(ValueError, match="not those that were written"):
            Checksums.of(sealed[:length])


@pytest.mark.parametrize("what", ["absent", "damaged", "of other ids"])
def test_a_file_without_its_checksums_is_prepared_again(
    tmp_path: Path, folder_of_text: Path, open_alone: OpenAlone, what: str
) -> None:
    """As one that an earlier version has written."""
    keys = {"source": "text", "path": str(folder_of_text), "validation_fraction": 0.2}
    first = open_alone(**keys)
    files = {path: path.read_bytes() for path in (tmp_path / "work").glob("*.npy*")}
    assert len(files) == 4
    (train,) = (tmp_path / "work").glob("train-*.npy")
    if what == "absent":
        checksums_of(train).unlink()
        flip(train, -1)  # nothing tells whether its ids are right
    elif what == "damaged":
        flip(checksums_of(train), 20)
    else:
        written(tmp_path / "ids.npy", 99)
        checksums_of(train).write_bytes(checksums_of(tmp_path / "ids.npy").read_bytes())
    again = open_alone(**keys)
    assert {path: path.read_bytes() for path in files} == files
    assert again.fingerprint == first.fingerprint


def test_a_start_reads_no_more_of_a_prepared_file_than_its_sample(
    tmp_path: Path, folder_of_text: Path, open_alone: OpenAlone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage between the rows of the sample is left for the step that reads it, so that starts stay fast."""
    for module in (checksums_module, seal, work):
        monkeypatch.setattr(module, "BLOCK_BYTES", 16)
    keys = {"source": "text", "path": str(folder_of_text), "seq_len": 2}
    num_rows = open_alone(**keys).train.num_rows
    assert num_rows > 1000
    tenth, eleventh = np.linspace(0, num_rows - 1, 64).astype(np.int64)[10:12]
    row = (tenth + eleventh) // 2
    (train,) = (tmp_path / "work").glob("train-*.npy")
    flip(train, 128 + int(row) * 2 * read_array(train).itemsize)
    samples = open_alone(**keys).train
    samples.rows(np.arange(tenth + 1))
    with pytest.raises(DataError, match="delete it, and the next start prepares it again"):
        samples.rows(np.array([row]))


def test_another_order_of_bytes_in_the_header_is_found(tmp_path: Path) -> None:
    """All ids would be others, and the bytes of all are as they were."""
    path = tmp_path / "ids.npy"
    written(path, 4097)
    content = path.read_bytes()
    assert content.count(b"<u2") == 1
    path.write_bytes(content.replace(b"<u2", b">u2"))
    with pytest.raises(DataError, match=r"ids\.npy is damaged: its header is not what was written"):
        opened(path)


def test_checksums_of_an_earlier_file_do_not_outlive_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a process is killed between the two files."""
    path = tmp_path / "ids.npy"
    written(path, 4097)

    def killed(self: Summing, header: bytes) -> Checksums:
        raise KeyboardInterrupt

    monkeypatch.setattr(Summing, "finish", killed)
    with pytest.raises(KeyboardInterrupt):
        written(path, 999)
    assert read_array(path).size == 999
    assert not checksums_of(path).exists()
