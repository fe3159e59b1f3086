"""A .npy file whose header lies about its shape or its type is refused with its name, before a number is read."""

from __future__ import annotations

import struct
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxtrain.common.errors import DataError
from nxtrain.data.samples import FileSamples
from nxtrain.data.storage import LocalFile


def write(path: Path, shape: str, descr: str = "'<u2'", content: bytes = b"\0" * 68) -> None:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
    text += " " * (64 - (len(text) + 11) % 64) + "\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + content)


def read(path: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return FileSamples(LocalFile(path), seq_len=16, vocab_size=10).digest()


def test_a_true_header_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a.npy", "(2, 17)")
    assert read(tmp_path / "a.npy")


SHAPES = ["(-1, 17)", "(2, -17)", "(-2, -17)", "(2**70, 17)", "(99999999999999999999, 17)", "(4611686018427387904, 17)"]
SHAPES += [
    "(True, 17)",
    "(1.5, 17)",
    "('2', 17)",
    "2",
    "()",
    "None",
    "(" * 200 + "1" + ")" * 200,
    "(9223372036854775807,) * 3",
]
DESCRS = ["'|O'", "'|V0'", "[('a', '<u2')]", "None", "'<u99999999999'", "'<M8[s]'", "'|b1'", "'<f4'", "''", "7"]


@pytest.mark.parametrize(("shape", "descr"), [*((s, "'<u2'") for s in SHAPES), *(("(2, 17)", d) for d in DESCRS)])
def test_a_header_that_lies_is_refused(tmp_path: Path, shape: str, descr: str) -> None:
    write(tmp_path / "a.npy", shape, descr)
    with pytest.raises(DataError, match=r"a\.npy"):
        read(tmp_path / "a.npy")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(-(2**65), 2**65), max_size=3).map(lambda sizes: repr(tuple(sizes))),
    noise=st.binary(max_size=12),
    at=st.integers(0, 100),
)
def test_any_header_is_read_or_refused(tmp_path: Path, shape: str, noise: bytes, at: int) -> None:
    file = tmp_path / "a.npy"
    write(file, shape)
    content = bytearray(file.read_bytes())
    content[at : at + len(noise)] = noise
    file.write_bytes(content)
    try:
        read(file)
    except DataError as error:
        assert "a.npy" in str(error)
