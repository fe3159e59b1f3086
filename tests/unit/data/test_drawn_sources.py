"""Drawn sources of every format give documents, counted skips or a readable error; never a traceback or a hang."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from nxtrain.common.errors import ConfigError, DataError
from nxtrain.data.arrow.inspection import inspect_corpus
from tests.support.corpora import FORMATS, prepare, texts_of, write_corpus

SUFFIXES = (
    *(".txt", ".jsonl", ".json", ".jsonl.gz", ".jsonl.zst", ".txt.gz", ".parquet", ".arrow", ".feather", ".csv", ""),
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["text", "id"]), inner, max_size=2),
    max_leaves=6,
)
LINES = st.one_of(JSON.map(lambda value: json.dumps(value).encode()), st.binary(max_size=20))


def check(source: Path, out: Path) -> None:
    """Every row is a document, empty, or a counted skip; or the sources are refused with a message."""
    try:
        summary = prepare(source, out=out, on_bad="skip").summary
    except (ConfigError, DataError) as error:
        assert str(error)
        assert not out.exists()
        return
    assert summary["rows"] == summary["documents"] + summary["empty"] + sum(summary["skipped"].values())
    assert len(texts_of(out)) == summary["documents"] > 0
    assert all(text.strip() for text in texts_of(out)) or summary["documents"]
    result = inspect_corpus(out, seq_len=8)
    assert result["documents"] == summary["documents"]
    raw = inspect_corpus(source, seq_len=8)
    assert (raw["documents"], raw["skipped"]) == (summary["documents"], summary["skipped"])
    bad = out.with_suffix(".bad.jsonl")
    rows = sum(json.loads(line)["rows"] for line in bad.read_text().splitlines()) if bad.exists() else 0
    assert rows == sum(summary["skipped"].values())


def in_folder(work: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work(Path(folder))


@given(st.binary(max_size=200), st.sampled_from(SUFFIXES))
@example(b"", ".jsonl")
@example(b"x", ".txt")
@example(b"", ".parquet")
@example(b"ARROW1\0\0", ".arrow")
@example(b"PAR1PAR1", ".parquet")
@example(b"\x1f\x8b", ".jsonl.gz")
@example(b"\x28\xb5\x2f\xfd", ".jsonl.zst")
@example(b"\xff\xff\xff\xff\xff\xff\xff\x7f", ".arrow")
@example(b"\xff\xff\xff\xff\0\0\0\0", "")
def test_any_bytes_under_any_name(content: bytes, suffix: str) -> None:
    def work(folder: Path) -> None:
        source = folder / f"a{suffix}"
        source.write_bytes(content)
        check(source, folder / "o.arrow")

    in_folder(work)


@given(st.lists(LINES, max_size=8))
@example([b'{"text": "' + b"x" * 3_000_000 + b'"}'])
@example([b'{"text": "x"}', b"{" * 100_000])
def test_any_lines_of_json(lines: list[bytes]) -> None:
    def work(folder: Path) -> None:
        (folder / "a.jsonl").write_bytes(b"\n".join(lines))
        check(folder / "a.jsonl", folder / "o.arrow")

    in_folder(work)


@settings(max_examples=150)
@given(
    st.sampled_from([name for name in FORMATS if name not in {"text", "save_to_disk"}]),
    st.lists(st.text(max_size=30), min_size=1, max_size=30),
    st.floats(0, 1),
    st.binary(max_size=4),
)
def test_any_file_that_is_cut_or_overwritten(name: str, texts: list[str], share: float, damage: bytes) -> None:
    texts = [text.encode(errors="replace").decode() for text in texts]

    def work(folder: Path) -> None:
        source = write_corpus(folder / "src", name, texts)
        content = source.read_bytes()
        at = int(share * len(content))
        source.write_bytes(content[:at] + damage + (content[at + len(damage) :] if damage else b""))
        check(source, folder / "o.arrow")

    in_folder(work)
