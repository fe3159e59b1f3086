"""Logs of JSON lines survive torn ends, damaged lines and full disks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nxtrain.common.io import jsonl
from nxtrain.common.io.jsonl import JsonlLog


def test_lines_come_back_in_order_and_an_absent_file_has_none(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "logs/a.jsonl")
    assert log.read() == []
    assert [log.add({"n": n, "text": "two\nlines"}) for n in range(3)] == [""] * 3
    assert log.read() == [{"n": n, "text": "two\nlines"} for n in range(3)]


@pytest.mark.parametrize("torn", [b'{"n": 1', b"{", b'{"n": 1}'])
def test_a_torn_end_costs_its_own_line_only(tmp_path: Path, torn: bytes) -> None:
    file = tmp_path / "a.jsonl"
    jsonl.append(file, '{"n": 0}')
    with file.open("ab") as out:
        out.write(torn)
    jsonl.append(file, '{"n": 2}')
    whole = [1] if torn.endswith(b"}") else []
    assert [line["n"] for line in jsonl.read(file)] == [0, *whole, 2]


@pytest.mark.parametrize("damaged", [b"\xff\x00", b"5", b"[1]", b"", b"[" * 99_999, b'{"n": "\xc3"}', b"null"])
def test_a_damaged_line_is_left_out(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"n": 1}\n' + damaged + b'\n{"n": 2}\r\n')
    assert jsonl.read(tmp_path / "a.jsonl") == [{"n": 1}, {"n": 2}]


def test_lines_wait_while_the_disk_refuses_and_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    log = JsonlLog(tmp_path / "logs/a.jsonl")
    assert log.add({"n": 1})
    assert log.add({"n": 2})
    assert len(log) == 2
    (tmp_path / "logs").unlink()
    assert log.add({"n": 3}) == ""
    assert [line["n"] for line in log.read()] == [1, 2, 3]


def numbers(file: Path) -> list[int]:
    return [json.loads(line)["n"] for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("lines", "last", "stay"),
    [([1, 2, 3], 2, [1, 2]), ([1, 2, 2, 3], 3, [1, 2, 3]), ([1, 5, 2, 6], 4, [1, 2]), ([3], 0, []), ([], 9, [])],
)
def test_of_numbered_lines_the_rising_ones_up_to_the_last_stay(
    tmp_path: Path, lines: list[int], last: int, stay: list[int]
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f'{{"n": {number}}}\n' for number in lines))
    jsonl.truncate_after(file, "n", last)
    assert numbers(file) == stay
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_lines_at_the_end_are_removed_in_place_and_others_by_a_new_file(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    number = file.stat().st_ino
    jsonl.truncate_after(file, "n", 2)
    assert file.stat().st_ino == number
    file.write_text('{"n": 1}\ntorn\n{"n": 2}')
    with file.open("rb") as old:  # a reader of the old file keeps it
        jsonl.truncate_after(file, "n", 2)
        assert old.read() == b'{"n": 1}\ntorn\n{"n": 2}'
    assert file.read_bytes() == b'{"n": 1}\n{"n": 2}\n'
