"""Streams of tokens: rows in any order, and a single bit that changes on the disk is found before it is trained on."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from nxtrain.common.errors import DataError, StorageError
from nxtrain.data.arrow import seal, work
from nxtrain.data.arrow.token_stream import StreamSamples, opened_before, write_stream
from tests.support.corpora import rows_of_stream
from tests.unit.data.conftest import OpenAlone

BLOCK, SEQ_LEN = 256, 8


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (seal, work):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)


def written(path: Path, num_tokens: int, seed: int = 0) -> NDArray[np.uint32]:
    """Write drawn documents in drawn groups; returns all ids."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, 1 << 32, num_tokens, dtype=np.uint32)
    cuts = np.sort(draw.integers(0, num_tokens, min(9, num_tokens)))
    documents = [part for part in np.split(ids, cuts) if part.size]
    half = len(documents) // 2
    write_stream(path, [documents[:half], documents[half:]] if half else [documents])
    return ids


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 10, 16, 17, 18, 1000, 4097])
def test_every_token_but_the_first_is_a_target_once_in_any_order(tmp_path: Path, num_tokens: int) -> None:
    ids = written(tmp_path / "s.arrow", num_tokens)
    samples, rows = StreamSamples(tmp_path / "s.arrow", SEQ_LEN), rows_of_stream(ids, SEQ_LEN)
    assert (samples.num_tokens, samples.num_rows) == (num_tokens, len(rows))
    targets = samples.rows(np.arange(samples.num_rows))[:, 1:].ravel()
    np.testing.assert_array_equal(targets, ids[1 : 1 + targets.size])
    assert num_tokens - 1 - targets.size < SEQ_LEN
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(rows)), 2))
        np.testing.assert_array_equal(samples.rows(order), rows[order])


def flip(path: Path, offset: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("seed", range(60))
def test_a_bit_that_changed_between_two_starts_is_found_or_changes_nothing(tmp_path: Path, seed: int) -> None:
    path, draw = tmp_path / "s.arrow", np.random.default_rng(seed)
    rows = rows_of_stream(written(path, 170 * SEQ_LEN + 1), SEQ_LEN)
    flip(path, int(draw.integers(0, path.stat().st_size)), int(draw.integers(0, 8)))
    try:
        samples = StreamSamples(path, SEQ_LEN)
        for row in range(samples.num_rows):
            np.testing.assert_array_equal(samples.rows(np.array([row]))[0], rows[row])
        assert samples.num_rows == len(rows)
    except DataError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(("num_tokens", "row"), [(4097, 70), (SEQ_LEN + 1, 0)])
def test_a_bit_that_changes_while_the_file_is_read_is_found(tmp_path: Path, num_tokens: int, row: int) -> None:
    """Also in a block that was verified before."""
    path = tmp_path / "s.arrow"
    ids = written(path, num_tokens)
    samples = StreamSamples(path, SEQ_LEN)
    samples.rows(np.array([row]))
    flip(path, path.read_bytes().index(ids[row * SEQ_LEN].tobytes()))
    with pytest.raises(DataError, match=r"s\.arrow is damaged: bytes .* are not what was written; prepare it again"):
        samples.rows(np.array([row]))


def test_a_start_reads_no_more_of_a_stream_than_its_footer(tmp_path: Path) -> None:
    """Damage of ids is left for the step that reads them, so that starts stay fast."""
    path = tmp_path / "s.arrow"
    ids = written(path, 40_000)
    flip(path, path.read_bytes().index(ids[20_000].tobytes()))
    samples = StreamSamples(path, SEQ_LEN)
    samples.rows(np.arange(1000))
    with pytest.raises(DataError, match="prepare it again"):
        samples.rows(np.arange(2490, 2510))


@pytest.mark.parametrize("what", ["cut short", "without a seal", "absent"])
def test_a_stream_that_cannot_be_opened_is_written_again(
    tmp_path: Path, folder_of_text: Path, open_alone: OpenAlone, what: str
) -> None:
    keys = {"source": "text", "path": str(folder_of_text), "validation_fraction": 0.2}
    first = open_alone(**keys)
    files = {path: path.read_bytes() for path in (tmp_path / "work").glob("*.arrow")}
    assert len(files) == 3
    for path, content in files.items():
        if what == "cut short":
            path.write_bytes(content[:-100])
        elif what == "without a seal":
            flip(path, content.index(b"NXTSEAL1"))
        else:
            path.unlink()
    again = open_alone(**keys)
    assert {path: path.read_bytes() for path in files} == files
    assert again.fingerprint == first.fingerprint


def test_full_disk_leaves_no_stream(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(
            StorageError, match=r"s\.arrow cannot be written: File too large; raise the limit on the size of files"
        ):
            written(tmp_path / "s.arrow", 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert opened_before(tmp_path / "s.arrow") is None
    written(tmp_path / "s.arrow", 99)
    assert {file.name for file in tmp_path.iterdir()} == {"s.arrow", "s.summary.json"}
