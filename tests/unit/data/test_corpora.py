"""Corpora: which documents there are, in which order, and what is said about files that are none."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from nxtrain.common.errors import DataError
from nxtrain.data.corpora import stdlib_corpus, text_corpus


def test_stdlib_is_real_text_in_the_same_order_each_time() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    corpus = stdlib_corpus()
    names = {file.relative_to(root).as_posix() for file in corpus.files}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any("/test" in f"/{name}" and "unittest" not in name for name in names)
    assert sum(file.stat().st_size for file in corpus.files) > 5_000_000
    assert (root / "argparse.py").read_text() in set(corpus)
    assert stdlib_corpus() == corpus


def test_stdlib_limit_takes_the_first_files_of_the_same_order() -> None:
    whole, part = stdlib_corpus(), stdlib_corpus(limit_bytes=500_000)
    assert part.files == whole.files[: len(part.files)]
    assert 300_000 < sum(file.stat().st_size for file in part.files) <= 500_000
    assert len({file.name[0] for file in part.files}) > 5, "a limit must sample the library, not cut its alphabet"


def test_a_folder_is_read_recursively_without_hidden_and_binary_files(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref")
    (tmp_path / "b" / "deep" / "two.md").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\xff")
    corpus = text_corpus(str(tmp_path))
    assert list(corpus) == ["one", "two"]
    assert corpus.skipped == {tmp_path / "picture.png": "binary: it holds a NUL byte"}


def test_a_glob_and_a_file_name_what_they_match(tmp_path: Path) -> None:
    for name in ("x.txt", "y.txt", "z.md"):
        (tmp_path / name).write_text(name)
    assert list(text_corpus(str(tmp_path / "*.txt"))) == ["x.txt", "y.txt"]
    assert list(text_corpus(str(tmp_path / "z.md"))) == ["z.md"]


def test_byte_order_mark_is_no_text_and_line_ends_stay(tmp_path: Path) -> None:
    (tmp_path / "windows.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert list(text_corpus(str(tmp_path))) == ["one\r\ntwo"]


def test_each_json_line_is_a_document(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text, "id": 1}) for text in ("first\nof two lines", "", "umlaut \u00fc")]
    (tmp_path / "docs.jsonl").write_text("\n\n".join(lines))
    assert list(text_corpus(str(tmp_path / "docs.jsonl"))) == ["first\nof two lines", "umlaut \u00fc"]


def test_undecodable_text_names_file_line_and_byte(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"good\nna\xefve\n")
    with pytest.raises(DataError, match=r"latin\.txt, line 2, byte 7: 0xef is not UTF-8"):
        list(text_corpus(str(tmp_path)))


def test_undecodable_stdlib_module_is_skipped_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good.py").write_text("pass")
    (tmp_path / "bad.py").write_bytes(b"# \xe9")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    corpus = stdlib_corpus()
    assert list(corpus) == ["pass"]
    assert "byte 2: 0xe9" in corpus.skipped[tmp_path / "bad.py"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "line 2: not JSON"),
        (b'{"body": "x"}', 'line 2: no string under "text"'),
        (b'["x"]', 'line 2: no string under "text"'),
        (b'{"text": 3}', 'line 2: no string under "text"'),
        (b'{"text": "ab\\ud800"}', "line 2: .*surrogate pair at character 2"),
        (b'{"text": "\xff"}', "line 2, byte 24: 0xff is not UTF-8"),
    ],
)
def test_bad_json_line_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    (tmp_path / "docs.jsonl").write_bytes(b'{"text": "x"}\n' + line)
    with pytest.raises(DataError, match=rf"docs\.jsonl, {reason}"):
        list(text_corpus(str(tmp_path)))


def test_missing_path_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path=.*nowhere\.txt does not exist"):
        text_corpus(str(tmp_path / "nowhere.txt"))
    with pytest.raises(DataError, match=r"\*\.txt matches no file"):
        text_corpus(str(tmp_path / "*.txt"))
    with pytest.raises(DataError, match="holds no file"):
        text_corpus(str(tmp_path))


@pytest.mark.parametrize("name", ["text.jsonl", "text.JSONL", "text.ndjson"])
def test_json_lines_are_known_by_their_ending_however_it_is_written(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"text": "one"}\n{"text": "two"}\n')
    assert list(text_corpus(str(tmp_path / name))) == ["one", "two"]


@pytest.mark.parametrize("name", ["text.txt", "text.json", "text"])
def test_json_lines_under_another_name_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"id": 1, "text": "one"}\n{"text": "two"}\n')
    with pytest.raises(DataError, match=r"each line is a JSON object with \"text\".*call it text\.jsonl"):
        list(text_corpus(str(tmp_path)))


@pytest.mark.parametrize(
    "text",
    ['{"text": 1}\n{"text": 2}\n', '{\n"text": "one"\n}\n', '{"text"\n{"text"\n', '{"text": "one"}', "[" * 100_000],
)
def test_what_only_resembles_json_lines_stays_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert list(text_corpus(str(tmp_path))) == [text]


def test_json_lines_nested_too_deeply_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ' + "[" * 100_000 + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: not JSON"):
        list(text_corpus(str(tmp_path)))
