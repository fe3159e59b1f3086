"""Token files: read as they are, and refused with file, row and column when they are not what training needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nxtrain.common.errors import DataError
from nxtrain.data import BatchShare, Loader
from nxtrain.data import samples as samples_module
from tests.unit.data.conftest import OpenAlone


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, ">i4"])
def test_step_takes_its_rows_of_the_file(tmp_path: Path, open_alone: OpenAlone, dtype: Any) -> None:
    table = np.random.default_rng(0).integers(0, 300, (12, 9)).astype(dtype)
    np.save(tmp_path / "ids.npy", table)
    data = open_alone(source="tokens", path=str(tmp_path / "ids.npy"), shuffle=False)
    assert (data.validation, data.tokenizer) == (None, None)
    for dp_rank in (0, 1):
        loader = Loader(data.train, BatchShare(4, 1, dp_rank, 2), seed=0, shuffle=False)
        for step in range(3):
            expected = table[step * 4 + dp_rank * 2 :][:2].astype(np.int64)
            batch = loader.batch(step)
            np.testing.assert_array_equal(batch.inputs[:, 0], expected[:, :-1])
            np.testing.assert_array_equal(batch.targets[:, 0], expected[:, 1:])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 9), np.float32), r"holds float32 of shape \(3, 9\)"),
        (np.zeros((3, 9), np.bool_), r"holds bool"),
        (np.zeros(9, np.int32), r"of shape \(9,\); rows of integer ids"),
        (np.zeros((3, 10), np.int32), r"rows of 10 ids, but train\.seq_len=8 reads 9; set train\.seq_len=9"),
        (np.zeros((0, 9), np.int32), "has no rows"),
        (np.array([[{}]]), r"not a \.npy array of numbers"),
    ],
)
def test_wrong_table_is_refused(tmp_path: Path, open_alone: OpenAlone, array: NDArray[Any], message: str) -> None:
    np.save(tmp_path / "ids.npy", array)
    with pytest.raises(DataError, match=rf"ids\.npy.*{message}"):
        open_alone(source="tokens", path=str(tmp_path / "ids.npy"))


@pytest.mark.parametrize(("value", "dtype"), [(300, np.uint16), (-1, np.int64), (2**63, np.uint64)])
def test_id_outside_of_the_vocabulary_names_its_place(
    tmp_path: Path, open_alone: OpenAlone, monkeypatch: pytest.MonkeyPatch, value: int, dtype: Any
) -> None:
    monkeypatch.setattr(samples_module, "_CHUNK_TOKENS", 20)
    table = np.full((10, 9), 299, dtype)
    table[7, 3] = table[9, 0] = value
    np.save(tmp_path / "ids.npy", table)
    with pytest.raises(
        DataError, match=rf"ids\.npy, row 7, column 3: id {value} is outside of the vocabulary, 0 to 299"
    ):
        open_alone(source="tokens", path=str(tmp_path / "ids.npy"))


def test_absent_file_is_refused_with_the_shape_that_it_should_have(
    tmp_path: Path, open_alone: OpenAlone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = r"train\.seq_len \+ 1 = 9 integer ids below 300 from .*: numpy\.save\('{0}', rows\){1}, or set data\.path"
    for path, relative in (("data/ids.npy", rf" \(relative to {tmp_path}\)"), (f"{tmp_path}/ids.npy", "")):
        with pytest.raises(DataError, match=rf"{path} cannot be read: No such file .*{wanted.format(path, relative)}"):
            open_alone(source="tokens", path=path)


def test_file_that_is_no_array_is_refused(tmp_path: Path, open_alone: OpenAlone) -> None:
    path = tmp_path / "ids.npy"
    with pytest.raises(DataError, match=r"ids\.npy cannot be read: No such file"):
        open_alone(source="tokens", path=str(path))
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"ids\.npy is not a \.npy array"):
        open_alone(source="tokens", path=str(path))
    np.save(path, np.zeros((100, 9), np.int64))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"ids\.npy is cut short: it has"):
        open_alone(source="tokens", path=str(path))
    with path.open("wb") as file:
        np.savez(file, ids=np.zeros((2, 9), np.int64))
    with pytest.raises(DataError, match="archive of arrays"):
        open_alone(source="tokens", path=str(path))


def test_fingerprint_follows_the_content(tmp_path: Path, open_alone: OpenAlone) -> None:
    table = np.zeros((4, 9), np.uint16)
    fingerprints = []
    for name, last in (("a", 0), ("b", 0), ("c", 1)):
        table[-1, -1] = last
        np.save(tmp_path / name, table)
        fingerprints.append(open_alone(source="tokens", path=str(tmp_path / f"{name}.npy")).fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]
