"""A preparation that ends anywhere goes on and gives the bytes of one that never ended."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nxtrain.common.errors import DataError, StoppedBySignal
from nxtrain.data.arrow import preparation, preparation_request, rows, work
from nxtrain.data.arrow.inspection import verify_corpus
from nxtrain.data.arrow.preparation import Watcher
from nxtrain.data.arrow.work import Counts
from tests.support.corpora import contents, documents, prepare, texts_of, write_corpus, write_tokenizer


class KilledError(Exception):
    """End of a preparation behind a batch."""


class Killing(Watcher):
    """Ends a preparation behind a number of batches."""

    def __init__(self, batches: int) -> None:
        self.waiting = batches

    def advance(self, num_bytes: int, counts: Counts) -> None:
        self.waiting -= 1
        if not self.waiting:
            raise KilledError


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "BATCH_BYTES", 1000)
    monkeypatch.setattr(preparation_request, "MIN_SHARD_BYTES", 0)
    monkeypatch.setattr(rows.split_lines, "__defaults__", (rows.MAX_DOCUMENT_BYTES, 700))


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    """Every format, with bad and empty rows between, at the end of a file and behind the last document."""
    texts = documents(40)
    folder = tmp_path / "src"
    names = ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "stream.arrow", "save_to_disk", "text")
    paths = [write_corpus(folder / str(number), name, texts) for number, name in enumerate(names)]
    for position in (0, len(paths)):
        bad = folder / f"bad{position}.jsonl"
        lines = [b'{"text": "fine %d"}' % number for number in range(30)]
        bad.write_bytes(b"\n".join([*lines[:9], b"{", *lines[9:], b'{"text": ""}', b"{}", b'"x"']))
        paths.insert(position, bad)
    truncated = folder / "truncated.jsonl.gz"
    truncated.write_bytes(paths[2].read_bytes()[:-30])
    last = folder / "last.jsonl.gz"
    last.write_bytes(truncated.read_bytes())
    return [*paths[:4], truncated, *paths[4:], last]


@pytest.mark.parametrize("options", [{}, {"shard_bytes": 3000}, {"tokenizer": "tokenizer"}], ids=str)
def test_any_number_of_ends_behind_any_batch_gives_the_same_bytes(
    options: dict[str, Any], sources: list[Path], tmp_path: Path
) -> None:
    if "tokenizer" in options:
        options = {"tokenizer": write_tokenizer(tmp_path / "tokenizer")}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    (tmp_path / "whole").mkdir()
    (tmp_path / "parts").mkdir()
    prepare(*sources, out=whole / "o.arrow", on_bad="skip", **options)
    wanted = contents(whole)
    assert {"o.bad.jsonl", "o.summary.json"} < wanted.keys()
    ends = 0
    for batches in (1, 2, 1, 3, *[1] * 200):
        try:
            prepare(*sources, out=parts / "o.arrow", on_bad="skip", watcher=Killing(batches), **options)
            break
        except KilledError:
            ends += 1
            _tear(parts / "o.arrow.partial", ends)
    assert ends > 10
    assert contents(parts) == wanted


def _tear(folder: Path, number: int) -> None:
    """Torn ends that a kill may leave: parts of a batch, a shard, a checksum, a bad row, and a line of the journal."""
    newest = max((folder / "shards").iterdir())
    ends = {
        newest: b"\xff" * 9,
        folder / f"{newest.stem}.xxh3": b"\xff" * 3,
        folder / "bad.jsonl": b'{"fi',
        folder / "journal.jsonl": b'{"posi',
    }
    for path, torn in ends.items():
        with path.open("ab") as file:
            file.write(torn * (number % 3))
    if number % 2:
        (folder / "shards" / f"{int(newest.stem) + 1:05}.arrow").write_bytes(b"ARROW1")


@pytest.mark.parametrize("options", [{}, {"shard_bytes": 3000}], ids=str)
def test_an_end_between_any_two_renames_gives_the_same_bytes(
    options: dict[str, Any], sources: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    prepare(*sources, out=tmp_path / "whole" / "o.arrow", on_bad="skip", **options)
    steps: list[tuple[Any, str]] = [
        (work.PreparationWork, "_end_shard"),
        (work, "replace_text"),
        (Path, "replace"),
        (work, "replace_bytes"),
        (work, "sync_folder"),
        (shutil, "rmtree"),
    ]
    for number, (owner, name) in enumerate(steps):
        out = tmp_path / str(number) / "o.arrow"
        out.parent.mkdir()
        for is_after in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, _ending(getattr(owner, name), is_after))
                with pytest.raises(KilledError):
                    prepare(*sources, out=out, on_bad="skip", **options)
            if out.exists():
                break
        prepare(*sources, out=out, on_bad="skip", **options)
        assert contents(out.parent) == contents(tmp_path / "whole"), name


def _ending(function: Callable[..., object], is_after: bool) -> Callable[..., object]:
    def call(*args: object, **options: object) -> object:
        if is_after:
            function(*args, **options)
        raise KilledError

    return call


def test_a_stop_at_a_bad_row_goes_on_with_skip(sources: list[Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"bad0\.jsonl, row 10: broken JSON"):
        prepare(*sources, out=tmp_path / "o.arrow")
    prepare(*sources, out=tmp_path / "o.arrow", on_bad="skip")
    prepare(*sources, out=tmp_path / "p.arrow", on_bad="skip")
    assert (tmp_path / "o.arrow").read_bytes() == (tmp_path / "p.arrow").read_bytes()
    assert (tmp_path / "o.bad.jsonl").read_bytes() == (tmp_path / "p.bad.jsonl").read_bytes()


class Counting(Watcher):
    """Number of the batches that a preparation has written."""

    batches = 0

    def advance(self, num_bytes: int, counts: Counts) -> None:
        self.batches += 1


@pytest.mark.parametrize("number", [0, 1, 20, 35, 60, 199])
@pytest.mark.parametrize("line", ["{", '{"other": 1}', '{"text": 3}'])
@pytest.mark.parametrize("shard_bytes", [0, 3000])
def test_a_refusal_leaves_only_what_spares_the_next_start_some_work(
    number: int, line: str, shard_bytes: int, tmp_path: Path
) -> None:
    lines = [json.dumps({"text": text}) for text in documents(200)]
    lines[number] = line
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    watcher = Counting()
    with pytest.raises(DataError, match=f"row {number + 1}"):
        prepare(tmp_path / "a.jsonl", out=tmp_path / "o.arrow", watcher=watcher, shard_bytes=shard_bytes)
    left = {path.name for path in tmp_path.iterdir()} - {"a.jsonl"}
    assert left == ({"o.arrow.partial"} if watcher.batches else set())


def test_a_begun_preparation_refuses_other_sources_settings_and_times(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "src", "a.jsonl", documents(200))
    out = tmp_path / "o.arrow"
    with pytest.raises(KilledError):
        prepare(source, out=out, watcher=Killing(2))
    before = contents(tmp_path)
    with pytest.raises(DataError, match=r"beginning of .*--restart\n.*field: 'text' there, 'other' here"):
        prepare(source, out=out, field="other")
    source.touch()
    with pytest.raises(DataError, match=r"--restart\n.*the times of the source files differ"):
        prepare(source, out=out)
    assert contents(tmp_path) == before
    prepare(source, out=out, restart=True)
    assert texts_of(out) == documents(200)


def test_two_processes_do_not_write_the_same_corpus(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "src", "a.jsonl", documents(200))
    out = tmp_path / "o.arrow"
    with pytest.raises(KilledError):
        prepare(source, out=out, watcher=Killing(2))
    with (tmp_path / "o.arrow.partial" / "journal.jsonl").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process prepares"):
            prepare(source, out=out)
    assert prepare(source, out=out).is_new


def test_lost_bytes_of_a_shard_are_noticed(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "src", "a.jsonl", documents(200))
    with pytest.raises(KilledError):
        prepare(source, out=tmp_path / "o.arrow", watcher=Killing(3))
    shard = tmp_path / "o.arrow.partial" / "shards" / "00000.arrow"
    content = shard.read_bytes()
    shard.write_bytes(content[:-8])
    with pytest.raises(DataError, match=r"has [\d,]+ bytes of [\d,]+ that were written; .*--restart"):
        prepare(source, out=tmp_path / "o.arrow")
    shard.write_bytes(content[:-300] + bytes(300))
    with pytest.raises(DataError, match=r"its end is not what was written; .*--restart"):
        prepare(source, out=tmp_path / "o.arrow")
    shard.write_bytes(content)
    assert prepare(source, out=tmp_path / "o.arrow").is_new


def test_the_begin_of_a_release_without_checksums_is_refused(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "src", "a.jsonl", documents(200))
    with pytest.raises(KilledError):
        prepare(source, out=tmp_path / "o.arrow", watcher=Killing(3))
    journal = tmp_path / "o.arrow.partial" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes().replace(b', "checksums": "xxh3-64"', b""))
    with pytest.raises(DataError, match=r"--restart\n.*the checksums of the two releases of nxtrain differ"):
        prepare(source, out=tmp_path / "o.arrow")


def test_damage_between_two_starts_is_found_when_the_corpus_is_verified(tmp_path: Path) -> None:
    """Checksums are those of the written bytes, and not of what a later start finds."""
    source = write_corpus(tmp_path / "src", "a.jsonl", [f"{number} {'x' * 3000}" for number in range(80)])
    with pytest.raises(KilledError):
        prepare(source, out=tmp_path / "o.arrow", watcher=Killing(75))
    shard = tmp_path / "o.arrow.partial" / "shards" / "00000.arrow"
    shard.write_bytes(shard.read_bytes().replace(b"7 xxx", b"8 xxx", 1))
    prepare(source, out=tmp_path / "o.arrow")
    with pytest.raises(
        DataError, match=r"1 damaged blocks; prepare it again:\n.*bytes 0 to 65,536, .* documents 0 to "
    ):
        verify_corpus(tmp_path / "o.arrow")


def test_a_stop_request_ends_behind_a_whole_batch(tmp_path: Path) -> None:
    class Asked(Watcher):
        def asked_to_stop(self) -> str:
            return "SIGTERM"

    source = write_corpus(tmp_path / "src", "a.jsonl", documents(200))
    with pytest.raises(StoppedBySignal, match=r"SIGTERM; the same command continues after [1-9]"):
        prepare(source, out=tmp_path / "o.arrow", watcher=Asked())
    prepare(source, out=tmp_path / "o.arrow")
    assert texts_of(tmp_path / "o.arrow") == documents(200)


def test_a_source_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "src", "a.jsonl", documents(200))

    class Appending(Watcher):
        def advance(self, num_bytes: int, counts: Counts) -> None:
            with source.open("ab") as file:
                file.write(b'{"text": "late"}\n')

    with pytest.raises(DataError, match="changed while it was read"):
        prepare(source, out=tmp_path / "o.arrow", watcher=Appending())
    assert not (tmp_path / "o.arrow").exists()
