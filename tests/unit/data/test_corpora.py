"""Corpora that a run makes: which documents there are, in which order, and messages about files that are not text."""

from __future__ import annotations

import json
import sysconfig
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.common.errors import DataError
from nxtrain.config.schema import DataConfig
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.rows import split_sections
from nxtrain.data.arrow.streams import content_hash
from nxtrain.data.arrow.training import RunCorpora, open_corpora
from nxtrain.data.corpora import stdlib_files, stdlib_texts, text_files
from tests.support.corpora import prepare


class Pieces:
    """Stream that gives few bytes at once."""

    def __init__(self, content: bytes, piece: int) -> None:
        self._content, self._piece = content, piece

    def read(self, size: int) -> bytes:
        part, self._content = self._content[: min(size, self._piece)], self._content[min(size, self._piece) :]
        return part


def corpus_of(path: Path | str, workdir: Path, fraction: float = 0.0) -> RunCorpora:
    return open_corpora(DataConfig(source="text", path=str(path), validation_fraction=fraction), workdir)


def documents(path: Path | str, workdir: Path) -> list[str]:
    (corpus,) = corpus_of(path, workdir).corpora
    return [corpus.text(number) for number in range(len(corpus))]


def test_stdlib_is_real_text_in_the_same_order_each_time() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    files = stdlib_files()
    names = {file.relative_to(root).as_posix() for file in files}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any("/test" in f"/{name}" and "unittest" not in name for name in names)
    assert sum(file.stat().st_size for file in files) > 5_000_000
    assert (root / "argparse.py").read_text() in set(stdlib_texts())
    assert stdlib_files() == files


def test_stdlib_limit_takes_the_first_files_of_the_same_order() -> None:
    whole, part = stdlib_files(), stdlib_files(limit_bytes=500_000)
    assert part == whole[: len(part)]
    assert 300_000 < sum(file.stat().st_size for file in part) <= 500_000
    assert len({file.name[0] for file in part}) > 5, "a limit must sample the library, not cut its alphabet"


def test_a_folder_is_read_recursively_without_hidden_and_binary_files(tmp_path: Path) -> None:
    root = tmp_path / "text"
    (root / "b" / "deep").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / ".git" / "HEAD").write_text("ref")
    (root / "b" / "deep" / "two.md").write_text("two")
    (root / "a.txt").write_text("one")
    (root / "empty.txt").write_text(" \n")
    (root / "picture.png").write_bytes(b"\x89PNG\0\xff")
    for _ in range(2):  # a second start, which reads no file, reports the same
        assert documents(root, tmp_path / "work") == ["one", "two"]
        (skipped,) = corpus_of(root, tmp_path / "work").skipped
        assert skipped == f"{root}/picture.png: binary: bytes 0 to 6 hold a NUL byte"


def test_a_glob_and_a_file_name_what_they_match(tmp_path: Path) -> None:
    for name in ("x.txt", "y.txt", "z.md"):
        (tmp_path / name).write_text(name)
    assert documents(tmp_path / "*.txt", tmp_path / "work") == ["x.txt", "y.txt"]
    assert documents(tmp_path / "z.md", tmp_path / "work") == ["z.md"]


def test_byte_order_mark_is_no_text_and_line_ends_stay(tmp_path: Path) -> None:
    (tmp_path / "windows.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert documents(tmp_path / "windows.txt", tmp_path / "work") == ["one\r\ntwo"]


@pytest.mark.parametrize("name", ["docs.jsonl", "docs.JSONL", "docs.ndjson", "docs.txt", "docs"])
def test_each_json_line_is_a_document_under_any_name(tmp_path: Path, name: str) -> None:
    lines = [json.dumps({"text": text, "id": 1}) for text in ("first\nof two lines", "", "umlaut \u00fc")]
    (tmp_path / name).write_text("\n\n".join(lines))
    assert documents(tmp_path / name, tmp_path / "work") == ["first\nof two lines", "umlaut \u00fc"]


def test_undecodable_text_names_file_and_byte(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"good\nna\xefve\n")
    with pytest.raises(DataError, match=r"latin\.txt, row 1: invalid UTF-8: byte 7 is 0xef .*iconv -t utf-8"):
        documents(tmp_path / "latin.txt", tmp_path / "work")
    assert not [*(tmp_path / "work").iterdir()]


def test_undecodable_stdlib_module_is_skipped_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "library"
    root.mkdir()
    (root / "good.py").write_text("pass")
    (root / "bad.py").write_bytes(b"# \xe9")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(root))
    run = open_corpora(DataConfig(source="stdlib"), tmp_path / "work")
    assert [run.corpora[0].text(number) for number in range(len(run.corpora[0]))] == ["pass"]
    assert run.skipped[0].startswith(f"{root}/bad.py: invalid UTF-8: byte 2 is 0xe9")


def test_missing_path_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path=.*nowhere\.txt does not exist"):
        text_files(str(tmp_path / "nowhere.txt"))
    with pytest.raises(DataError, match=r"\*\.txt matches no file"):
        text_files(str(tmp_path / "*.txt"))
    with pytest.raises(DataError, match="holds no file"):
        text_files(str(tmp_path))


@pytest.mark.parametrize("text", ['{\n"text": "one"\n}\n', '{"text"\n{"text"\n', "[" * 100_000])
def test_what_only_resembles_json_lines_stays_text(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert "".join(documents(tmp_path / "a.txt", tmp_path / "work")) == text


LETTERS = st.lists(st.sampled_from(["a", "\n", "\u00e9", "\u2603", "\U0001f642", "words of a line\n"]), max_size=60)


@given(LETTERS, st.integers(8, 40), st.integers(1, 9))
def test_sections_end_with_lines_or_letters_and_join_to_the_text(letters: list[str], limit: int, piece: int) -> None:
    content = "".join(letters).encode()
    sections = list(split_sections(Pieces(content, piece), limit))
    assert b"".join(sections) == content
    for section in sections:
        assert 0 < len(section) <= limit
        section.decode()
    for section, following in pairwise(sections):
        assert section.endswith(b"\n") or b"\n" not in section
        assert len(section) + len(following.decode()[0].encode()) > limit or section.endswith(b"\n")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"line one\nline two\nline 3", [("line one\n", True), ("line two\n", True), ("line 3", False)]),
        (b"line one\n\0\n", [("line one\n", False)]),
        (b"line one\n" + b" " * 18 + b"line two\n", [("line one\n", False), ("line two\n", False)]),
        (b"line one\nline \xff\nline two\n", [("line one\n", False), ("line two\n", False)]),
    ],
    ids=["all", "binary", "blank", "invalid"],
)
def test_a_section_continues_unless_the_next_one_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, expected: list[tuple[str, bool]]
) -> None:
    monkeypatch.setattr(split_sections, "__defaults__", (9,))
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.txt").write_bytes(b"another")
    prepare(tmp_path / "a.txt", tmp_path / "b.txt", out=tmp_path / "o.arrow", sections=True, on_bad="skip")
    corpus = PreparedCorpus(tmp_path / "o.arrow")
    actual = [(corpus.text(number), corpus.continues(number)) for number in range(len(corpus))]
    assert actual == [*expected, ("another", False)]


def test_a_changed_time_makes_the_corpus_again_and_equal_content_keeps_its_identity(tmp_path: Path) -> None:
    """A change of the same length in the middle of a large file shows in no sample of the file."""
    work = tmp_path / "work"
    file = tmp_path / "a.txt"
    content = bytearray(b"a line of the text\n" * 30_000)
    file.write_bytes(content)
    first = corpus_of(file, work).contents
    file.touch()
    assert corpus_of(file, work).contents == first
    content[200_000] ^= 1
    file.write_bytes(content)
    assert corpus_of(file, work).contents != first


def test_split_ignores_the_order_of_the_corpus_and_hardly_changes_with_its_growth(tmp_path: Path) -> None:
    texts = [f"document {number} of some words, " * 9 for number in range(40)]

    def held(name: str, corpus: list[str]) -> set[bytes]:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(f"{json.dumps({'text': text})}\n" for text in corpus))
        run = corpus_of(path, tmp_path / name, 0.3)
        hashed = {text.encode(): content_hash(text.encode()) for text in corpus}
        return {text for text, number in hashed.items() if number < run.held_out * 2.0**64}

    before = held("first", texts)
    assert before == held("reversed", texts[::-1])
    assert 12 <= len(before) <= 13
    grown = held("grown", [*texts, "one more document, which moves the threshold by one document at most"])
    assert len(before ^ grown) <= 2
