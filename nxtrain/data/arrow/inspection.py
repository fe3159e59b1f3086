"""Statistics of a corpus: sizes, document lengths, sample documents, and the waste of each packing method."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nxtrain.common.errors import ConfigError, DataError
from nxtrain.common.io.object_store import Location
from nxtrain.common.process.progress import Progress
from nxtrain.data.arrow.columns import encode, open_tokenizer
from nxtrain.data.arrow.opening import is_prepared
from nxtrain.data.arrow.preparation import source_rows
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.rows import DAMAGED, BadRow, Fields, is_blank
from nxtrain.data.arrow.sources import Source, find_sources, summary
from nxtrain.data.arrow.work import Position
from nxtrain.data.packing import best_fit_rows
from nxtrain.data.tokenization import TextTokenizer

_SAMPLES = 3
_SAMPLE_CHARS = 160
_SAMPLE_IDS = 16

_EXPECTED = 64
"""Number of documents that are prefetched from object storage."""

_BATCH_BYTES = 4 << 20
_BATCH_DOCUMENTS = 1 << 16


class Lengths:
    """Histogram of document lengths, with at most sqrt(2 N) entries in memory for a corpus of N tokens."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.number, self.total = 0, 0

    def add(self, lengths: NDArray[np.int64]) -> None:
        """Add document lengths to the histogram."""
        values, counts = np.unique(lengths, return_counts=True)
        self._counts.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        self.number += lengths.size
        self.total += int(lengths.sum())

    def quantile(self, share: float) -> int:
        """Smallest length that at least a given share of the documents does not exceed; 0 without documents."""
        rank, below = max(1, math.ceil(share * self.number)), 0
        for length, number in sorted(self._counts.items()):
            below += number
            if below >= rank:
                return length
        return 0


class PackingWaste:
    """Share of tokens or positions that each packing method wastes, for documents in corpus order.

    `concat` cuts one stream at every row, and drops the tokens after the last full row. `best_fit` never cuts a
    document that fits a row, and pads the free rest of each row.

    Args:
        seq_len: Targets in a row; a row has one token more.
    """

    def __init__(self, seq_len: int) -> None:
        self._seq_len, self._capacity = seq_len, seq_len + 1
        self._rests = np.zeros(self._capacity, np.int64)
        self._num_whole, self._total = 0, 0
        self._cut, self._long = 0, 0

    def add(self, lengths: NDArray[np.int64]) -> None:
        """Add documents, given by their numbers of tokens."""
        whole, rest = np.divmod(lengths, self._capacity)
        self._num_whole += int(whole.sum())
        self._rests += np.bincount(rest, minlength=self._capacity)
        ends = self._total + np.cumsum(lengths)
        begins = ends - lengths
        fits = lengths <= self._capacity
        # A row ends with the token that the next row begins with, so that a document may end one after a multiple.
        is_cut = begins // self._seq_len != np.maximum(ends - 2, begins) // self._seq_len
        self._cut += int(np.count_nonzero(fits & is_cut))
        self._long += int(np.count_nonzero(~fits))
        self._total += int(lengths.sum())

    def to_json(self) -> dict[str, Any]:
        """Wasted share, number of rows and number of cut documents, for each packing method."""
        rows = max(0, self._total - 1) // self._seq_len
        wasted = float(self._total)
        if self._total > 1:
            wasted = 1 - rows * self._seq_len / (self._total - 1)
        num_fit = self._num_whole + best_fit_rows(self._rests, self._capacity)
        free = 0.0
        if num_fit:
            free = 1 - self._total / (num_fit * self._capacity)
        return {
            "waste": {"concat": wasted, "best_fit": free},
            "rows": {"concat": rows, "best_fit": num_fit},
            "cut": {"concat": self._cut + self._long, "best_fit": self._long},
        }


# 8 arguments: the options of the command
def inspect_corpus(
    path: Location,
    *,
    seq_len: int,
    tokenizer: Path | None = None,
    field: str = "text",
    lines: bool = False,
    only: str = "",
    mixed: bool = False,
    cache: Path = Path(),
) -> dict[str, Any]:
    """Compute statistics of a prepared corpus, or of source files, in one pass and bounded memory.

    Args:
        tokenizer: Tokenizer that counts the tokens of text; None to measure text in bytes.
        field, lines, only, mixed: As in `PreparationRequest`, for source files.

    Raises:
        ConfigError: There is no such path.
        DataError: A damaged file, an unknown format, or a tokenizer that did not make the ids.
        StorageError: The storage fails.
    """
    if isinstance(path, Path) and not path.exists():
        raise ConfigError(f"{path} does not exist; give a prepared corpus, or files that data prepare reads")
    loaded = open_tokenizer(tokenizer) if tokenizer else None
    if is_prepared(path):
        return _of_prepared(PreparedCorpus(path, cache), seq_len, loaded)
    return _of_sources(path, find_sources([path], only, mixed), seq_len, loaded, field, lines)


def refuse_incomplete(statistics: dict[str, Any]) -> None:
    """Raise a DataError for statistics of files that are damaged or have no document."""
    path, skipped = statistics["path"], statistics["skipped"]
    if DAMAGED in skipped:
        raise DataError(
            f"{path} is {DAMAGED}: {skipped[DAMAGED]:,} parts of it cannot be read, and the statistics are those of "
            "the rest; copy or download the file again"
        )
    if not statistics["documents"]:
        reasons = ", ".join(f"{reason} {number:,}" for reason, number in skipped.items()) or "all rows are empty"
        raise DataError(f"{path} holds no document ({reasons}); look at the files and at --field")


def verify_corpus(path: Location, cache: Path = Path()) -> None:
    """Verify every byte of a prepared corpus against its checksums.

    Raises:
        ConfigError: There is no such path.
        DataError: Bytes are damaged, or the corpus has no checksums.
        StorageError: The storage fails.
    """
    if isinstance(path, Path) and not path.exists():
        raise ConfigError(f"{path} does not exist; give a prepared corpus")
    corpus = PreparedCorpus(path, cache)
    if not corpus.has_checksums:
        raise DataError(
            f"{corpus.path} has no checksums to compare, since an earlier release prepared it; prepare it again with "
            "--restart"
        )
    with Progress(f"verifying {path}", corpus.num_bytes) as progress:
        corpus.verify(progress.show)


def _of_prepared(corpus: PreparedCorpus, seq_len: int, tokenizer: TextTokenizer | None) -> dict[str, Any]:
    if corpus.is_ids and tokenizer and tokenizer.digest != corpus.tokenizer:
        raise DataError(f"--tokenizer {tokenizer.path} did not make the ids of {corpus.path}; give the one that did")
    statistics = _Statistics(seq_len, tokenizer, has_tokens=corpus.is_ids or tokenizer is not None)
    if corpus.is_ids:
        for lengths in corpus.lengths():
            statistics.add_lengths(lengths)
        statistics.num_bytes = statistics.lengths.total * corpus.dtype.itemsize
    else:
        for begin in range(0, len(corpus), _EXPECTED):
            documents = range(begin, min(begin + _EXPECTED, len(corpus)))
            corpus.expect(documents)
            for document in documents:
                statistics.add(corpus.content(document))
    if corpus.has_pairs:
        pairs = {"pairs": len(corpus) // 2, "samples": _pairs(corpus, tokenizer)}
    else:
        pairs = {"pairs": None, "samples": _samples(corpus, tokenizer)}
    return {
        "path": str(corpus.path),
        "format": "prepared ids" if corpus.is_ids else "prepared text",
        "files": len(corpus.files),
        "file_bytes": corpus.num_bytes,
        "skipped": {},
        "checksums": corpus.has_checksums,
        "verified": False,
        **statistics.to_json(),
        **pairs,
    }


def _samples(corpus: PreparedCorpus, tokenizer: TextTokenizer | None) -> list[dict[str, Any]]:
    """First characters or tokens of three sample documents."""
    if not len(corpus):
        return []
    documents = sorted({0, len(corpus) // 2, len(corpus) - 1})
    return [{"document": document, "begins": _sample(corpus, document, tokenizer)} for document in documents]


def _pairs(corpus: PreparedCorpus, tokenizer: TextTokenizer | None) -> list[dict[str, Any]]:
    """Three sample pairs: the end of the prompt, and the beginning of both answers; ids without a tokenizer."""
    samples = []
    num_pairs = len(corpus) // 2
    for pair in sorted({0, num_pairs // 2, num_pairs - 1} if num_pairs else ()):
        sample: dict[str, Any] = {"pair": pair}
        for document, side in ((2 * pair, "chosen"), (2 * pair + 1, "rejected")):
            content = corpus.content(document)
            begin, ids = corpus.prompt(document, content), corpus.ids(document)
            sample["prompt"] = _shown(ids[max(0, begin - _SAMPLE_IDS) : begin], tokenizer)
            sample[side] = _shown(ids[begin : begin + _SAMPLE_IDS], tokenizer)
        samples.append(sample)
    return samples


def _shown(ids: NDArray[Any], tokenizer: TextTokenizer | None) -> str | list[int]:
    numbers: list[int] = ids.tolist()
    if tokenizer is None:
        return numbers
    text: str = tokenizer.tokenizer.decode(numbers, skip_special_tokens=False)
    return text


def _sample(corpus: PreparedCorpus, document: int, tokenizer: TextTokenizer | None) -> str | list[int]:
    if not corpus.is_ids:
        return corpus.text(document)[:_SAMPLE_CHARS]
    ids: list[int] = corpus.ids(document)[:_SAMPLE_CHARS].tolist()
    if tokenizer is None:
        return ids[:_SAMPLE_IDS]
    text: str = tokenizer.tokenizer.decode(ids)
    return text[:_SAMPLE_CHARS]


def _of_sources(
    path: Location, sources: Sequence[Source], seq_len: int, tokenizer: TextTokenizer | None, field: str, lines: bool
) -> dict[str, Any]:
    statistics = _Statistics(seq_len, tokenizer, has_tokens=tokenizer is not None)
    skipped: Counter[str] = Counter()
    samples: list[dict[str, Any]] = []
    for _, _, row in source_rows(sources, Fields(field), lines, Position(), lambda _: None):
        if isinstance(row, BadRow):
            skipped[row.reason] += row.num_rows
        elif not is_blank(row.text):
            if len(samples) < _SAMPLES:
                begins = row.text[: 4 * _SAMPLE_CHARS].decode(errors="ignore")[:_SAMPLE_CHARS]
                samples.append({"document": len(samples), "begins": begins})
            statistics.add(row.text)
    return {
        "path": str(path),
        "format": summary(sources),
        "files": len(sources),
        "file_bytes": sum(source.size for source in sources),
        "skipped": dict(sorted(skipped.items())),
        "checksums": None,
        "verified": False,
        **statistics.to_json(),
        "pairs": None,
        "samples": samples,
    }


class _Statistics:
    """Accumulator of document lengths and packing waste, in tokens, or in bytes of text."""

    def __init__(self, seq_len: int, tokenizer: TextTokenizer | None, *, has_tokens: bool) -> None:
        self._seq_len, self._tokenizer = seq_len, tokenizer
        self._texts: list[bytes] = []
        self._held = 0
        self._has_tokens = has_tokens
        self.lengths, self._packing = Lengths(), PackingWaste(seq_len)
        self.num_bytes = 0

    def add(self, text: bytes) -> None:
        """Add one document."""
        self._texts.append(text)
        self._held += len(text)
        if self._held >= _BATCH_BYTES or len(self._texts) >= _BATCH_DOCUMENTS:
            self._add_texts()

    def add_lengths(self, lengths: NDArray[np.int64]) -> None:
        """Add documents, given by their lengths."""
        self.lengths.add(lengths)
        if self._has_tokens:
            self._packing.add(lengths)

    def to_json(self) -> dict[str, Any]:
        """Statistics of all added documents."""
        self._add_texts()
        lengths = self.lengths
        tokens, unit = None, "bytes"
        packed: dict[str, Any] = {key: {"concat": None, "best_fit": None} for key in ("waste", "rows", "cut")}
        if self._has_tokens:
            tokens, unit = lengths.total, "tokens"
            packed = self._packing.to_json()
        mean = 0.0
        if lengths.number:
            mean = lengths.total / lengths.number
        return {
            "documents": lengths.number,
            "tokens": tokens,
            "bytes": self.num_bytes,
            "unit": unit,
            "lengths": {
                "min": lengths.quantile(0.0),
                "median": lengths.quantile(0.5),
                "p99": lengths.quantile(0.99),
                "max": lengths.quantile(1.0),
                "mean": mean,
            },
            "seq_len": self._seq_len,
            **packed,
        }

    def _add_texts(self) -> None:
        if not self._texts:
            return
        sizes = [len(text) for text in self._texts]
        self.num_bytes += self._held
        if self._tokenizer:
            sizes = [ids.size for ids in encode(self._tokenizer, self._texts)]
        self.add_lengths(np.array(sizes, np.int64))
        self._texts.clear()
        self._held = 0
