"""Rows of a prepared corpus, tokenized and packed on the fly, in lanes independent of the number of ranks.

The endless order of documents is divided among a fixed number of L lanes. Lane l has positions l, l + L, l + 2L and so
on. Each lane packs its own documents into rows. A lane's position is two numbers, from which its rows continue exactly.

A position of `concat` is a document and the token in it at which the next row begins. A position of `best_fit` is the
first document of a window, and the number of rows returned from the window. A window has the tokens of `WINDOW_ROWS`
rows or slightly more, and is packed as a whole. Its documents are tokenized again after a resume.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from nxtrain.common.errors import DataError
from nxtrain.common.io.object_store import Location
from nxtrain.common.vocab import END_BIT, IGNORE_INDEX, PROMPT_BIT
from nxtrain.data.arrow.columns import encode_prompted
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.mixture import Mixture
from nxtrain.data.order import shuffled
from nxtrain.data.packing import best_fit
from nxtrain.data.stream_loader import Lane, LaneOrder, LanePosition
from nxtrain.data.tokenization import TextTokenizer, load_tokenizer

WINDOW_ROWS = 128
"""Rows that `best_fit` packs together. With log-normal document lengths, 0.5 to 0.7% of the positions are padding."""

_GROUP_BYTES = 1 << 16
"""Bytes of text that a lane tokenizes in one call, so that all threads of the tokenizer are busy."""

_PERMUTED = 64
"""Number of documents of a lane whose indices are computed in one call."""

Ids = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Documents:
    """Documents of a corpus as token ids, in an endless order.

    Args:
        corpus: Corpus of text, or of ids that end with the end-of-text id.
        tokenizer: Tokenizer for a corpus of text; None for ids.
        held_out: Share of the documents that is held out, selected by a hash of their content. All answers of a
            conversation are on the side of the first.
        mark: Called with the name of each document before it is read, and before it is tokenized alone.
    """

    corpus: PreparedCorpus
    tokenizer: TextTokenizer | None
    vocab_size: int
    held_out: float = 0.0
    mark: Callable[[str], None] | None = None

    def lane(self, order: LaneOrder, lane: int, start: int = 0) -> Iterator[tuple[int, Ids]]:
        """Iterate endlessly over the documents of a lane from an ordinal on, each with its ordinal."""
        total, num_skipped = len(self.corpus), 0
        numbers = self._document_numbers(order, lane, start)
        # A process that must name its document tokenizes one at a time; it has a single thread in any case.
        most_bytes = 1 if self.mark else _GROUP_BYTES
        while True:
            ordinals: list[int] = []
            contents: list[bytes] = []
            prompts: list[int] = []
            size = 0
            while size < most_bytes:
                ordinal, document = next(numbers)
                if self.mark:
                    self.mark(self.corpus.name_of(document))
                content = self.corpus.content(document)
                if self.is_held_out(document, content):
                    num_skipped += 1
                    if num_skipped > total:
                        self._refuse_empty(order)
                else:
                    ordinals.append(ordinal)
                    contents.append(content)
                    prompts.append(self.corpus.prompt(document, content))
                    size, num_skipped = size + len(content), 0
            yield from zip(ordinals, self.ids(contents, prompts), strict=True)

    def is_held_out(self, document: int, content: bytes) -> bool:
        """True if a document of the corpus belongs to the held-out share."""
        return self.held_out > 0 and is_held_out(self.corpus.split_content(document, content), self.held_out)

    def _refuse_empty(self, order: LaneOrder) -> NoReturn:
        """Raise a DataError for a lane whose documents are all held out."""
        total = len(self.corpus)
        documents, way_out = f"of {total:,} in the corpus", "lower it"
        shared = math.gcd(order.lanes, total)
        if (
            shared > 1 and not order.shuffle
        ):  # in the order of the corpus, a lane reads the same documents in each epoch
            documents = f"of the {total // shared:,} that one of {order.lanes} lanes reads in the order of the corpus"
            way_out += ", set data.shuffle=true"
        raise DataError(
            f"{self.corpus.path}: data.validation_fraction={self.held_out} holds out every document {documents}; "
            f"{way_out}, or give more documents"
        )

    def _document_numbers(self, order: LaneOrder, lane: int, start: int) -> Iterator[tuple[int, int]]:
        """Iterate endlessly over the ordinals of a lane from `start` on, each with the index of its document."""
        total = len(self.corpus)
        for begin in count(start, _PERMUTED):
            ordinals = np.arange(begin, begin + _PERMUTED)
            positions = lane + ordinals * order.lanes
            documents = positions % total
            if order.shuffle:
                documents = shuffled(positions, total, order.seed)
            self.corpus.expect(documents.tolist())
            yield from zip(ordinals.tolist(), documents.tolist(), strict=True)

    def ids(self, contents: Sequence[bytes], prompts: Sequence[int], continues: Sequence[bool] = ()) -> Iterator[Ids]:
        """Token ids of documents, each with the end-of-text id; ids of prompts have `PROMPT_BIT`.

        Args:
            contents: Stored bytes of the documents.
            prompts: Length of each document's prompt.
            continues: True for a text that continues the document before; empty for none.
        """
        if not self.corpus.is_ids:
            assert self.tokenizer is not None
            for ids, num_tokens in encode_prompted(self.tokenizer, contents, prompts, continues):
                yield _marked(ids, num_tokens)
            return
        for content, num_tokens in zip(contents, prompts, strict=True):
            ids = np.frombuffer(content, self.corpus.dtype)
            if ids.size and int(ids.max()) >= self.vocab_size:
                raise DataError(
                    f"{self.corpus.path} has the id {int(ids.max())}, outside of the vocabulary, 0 to "
                    f"{self.vocab_size - 1}; set model.config.vocab_size to that of the tokenizer that made the ids"
                )
            yield _marked(ids, num_tokens)


def is_held_out(content: bytes, share: float) -> bool:
    """True if a document belongs to the held-out share. Equal documents are always on the same side of the split."""
    return share > 0 and content_hash(content) < share * 2.0**64


def content_hash(content: bytes) -> int:
    """Hash of a document's content, uniform below 2^64."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _marked(ids: Ids, num_tokens: int) -> Ids:
    """Token ids of a document, with `PROMPT_BIT` set on the first `prompt` tokens."""
    if not num_tokens:
        return ids
    marked: Ids = np.where(np.arange(ids.size) < num_tokens, ids.astype(np.uint32) | np.uint32(PROMPT_BIT), ids)
    return marked


class ConcatLane:
    """Lane that concatenates documents and cuts them into rows; a row begins with the last token of the previous row.

    Args:
        documents: Documents from the document of `position` on, each with its ordinal.
        position: Document and token at which the next row begins.
    """

    def __init__(self, documents: Iterator[tuple[int, Ids]], seq_len: int, position: LanePosition) -> None:
        self._documents, self._seq_len = documents, seq_len
        self.position = position
        self._held: deque[tuple[int, Ids]] = deque()

    def row(self) -> NDArray[np.int32]:
        """Next row: (S + 1,) token ids with marks."""
        capacity = self._seq_len + 1
        row, filled = np.empty(capacity, np.int32), 0
        start, number = self.position[1], 0
        while True:
            if number == len(self._held):
                self._held.append(next(self._documents))
            ordinal, ids = self._held[number]
            taken = ids[start : start + capacity - filled]
            row[filled : filled + taken.size] = taken
            filled += taken.size
            if taken.size and start + taken.size == ids.size:
                row[filled - 1] |= END_BIT
            if filled == capacity:
                self.position = (ordinal, start + taken.size - 1)
                break
            start, number = 0, number + 1
        while self._held[0][0] != self.position[0]:
            self._held.popleft()
        return row


class BestFitLane:
    """Lane that packs whole documents into rows by best fit; only documents longer than a row are cut.

    Args:
        position: First document of the window, and number of rows returned from the window.
        seed: Seed of the row order in a window; None for the order of packing.
    """

    def __init__(
        self, documents: Iterator[tuple[int, Ids]], seq_len: int, position: LanePosition, seed: int | None
    ) -> None:
        self._documents, self._capacity = documents, seq_len + 1
        self._seed = seed
        self._begin, self._given = position
        self._next = self._begin
        self._rows: NDArray[np.int32] = np.empty((0, seq_len + 1), np.int32)

    @property
    def position(self) -> LanePosition:
        """Position of the next row."""
        return self._begin, self._given

    def row(self) -> NDArray[np.int32]:
        """Next row: (S + 1,) token ids with marks, `IGNORE_INDEX` after the last document."""
        if not len(self._rows):
            self._fill()
            if self._given >= len(self._rows):  # a position in other data, whose window had more rows
                self._begin, self._given = self._next, 0
                self._fill()
        row: NDArray[np.int32] = self._rows[self._given]
        self._given += 1
        if self._given == len(self._rows):
            self._begin, self._given = self._next, 0
            self._rows = self._rows[:0]
        return row

    def _fill(self) -> None:
        window: list[Ids] = []
        num_tokens = 0
        while num_tokens < WINDOW_ROWS * self._capacity:
            ordinal, ids = next(self._documents)
            window.append(ids)
            num_tokens += ids.size
            self._next = ordinal + 1
        packing = best_fit(np.array([ids.size for ids in window], np.int64), self._capacity)
        order = np.arange(packing.num_rows)
        if self._seed is not None:
            order[shuffled(order, packing.num_rows, self._seed + self._begin)] = order.copy()
        table = np.full((packing.num_rows, self._capacity), IGNORE_INDEX, np.int32)
        flat, begins = table.reshape(-1), order[packing.rows] * self._capacity + packing.begins
        # One copy for each piece: an index for each token would take longer than the copies.
        pieces = np.stack([packing.documents, packing.starts, packing.lengths, begins], axis=1)
        for document, start, length, begin in pieces.tolist():
            ids = window[document]
            flat[begin : begin + length] = ids[start : start + length]
            if start + length == ids.size:
                flat[begin + length - 1] |= END_BIT
        self._rows = table


def open_lane(
    documents: Documents,
    packing: Literal["concat", "best_fit"],
    seq_len: int,
    order: LaneOrder,
    lane: int,
    position: LanePosition = (0, 0),
) -> Lane:
    """Open a lane of a corpus at a position."""
    of_lane = documents.lane(order, lane, position[0])
    if packing == "concat":
        return ConcatLane(of_lane, seq_len, position)
    seed = None
    if order.shuffle:
        seed = order.seed + lane
    return BestFitLane(of_lane, seq_len, position, seed)


class MixedLane:
    """Lane of a mixture, which returns rows of several corpora by their shares; each row is from one corpus.

    In each block of as many rows as lanes, every lane gets one row, in a random order for each block. A lane therefore
    gets rows of every corpus, for any period of the mixture.

    Args:
        open_part: Opens the lane of a corpus, given its index and the position in the corpus.
        position: Number of rows that the lane has returned, and the position in each corpus.
    """

    def __init__(
        self,
        mixture: Mixture,
        open_part: Callable[[int, LanePosition], Lane],
        order: LaneOrder,
        lane: int,
        position: LanePosition,
    ) -> None:
        self._mixture = mixture
        self._order, self._lane = order, lane
        self._given = position[0]
        num_corpora = len(mixture.shares)
        numbers = [*position[1:], *[0] * (2 * num_corpora)]
        self._parts = [
            open_part(corpus, (numbers[2 * corpus], numbers[2 * corpus + 1])) for corpus in range(num_corpora)
        ]

    @property
    def position(self) -> LanePosition:
        """Position of the next row."""
        return self._given, *chain.from_iterable(part.position for part in self._parts)

    def row(self) -> NDArray[np.int32]:
        """Next row: (S + 1,) token ids with `PROMPT_BIT` and `END_BIT`, `IGNORE_INDEX` after the last document."""
        lanes = self._order.lanes
        position = np.array([self._given * lanes + self._lane])
        corpora, _ = self._mixture.rows(self._given * lanes + shuffled(position, lanes, self._order.seed))
        self._given += 1
        return self._parts[int(corpora[0])].row()


@dataclass(frozen=True)
class CorpusLanes:
    """Source of the lanes of prepared corpora, which worker processes open.

    Args:
        identities: Identities of the checked corpora, with which the opened corpora must agree.
        mixture: Shares of several corpora; None for one corpus.
        tokenizer: The `tokenizer.json` for text; None for ids only.
    """

    paths: tuple[Location, ...]
    identities: tuple[str, ...]
    mixture: Mixture | None
    tokenizer: Path | None
    end_of_text: str
    vocab_size: int
    held_out: float
    packing: Literal["concat", "best_fit"]
    seq_len: int
    cache: Path = Path()

    def documents(self, mark: Callable[[str], None] | None = None) -> list[Documents]:
        """Open the documents of each corpus."""
        corpora = [PreparedCorpus(path, self.cache) for path in self.paths]
        for corpus, identity in zip(corpora, self.identities, strict=True):
            if corpus.identity != identity:
                raise DataError(f"{corpus.path} differs from the corpus on the machine that checked it; copy it again")
        tokenizer = load_tokenizer(self.tokenizer, self.vocab_size, self.end_of_text) if self.tokenizer else None
        return [Documents(corpus, tokenizer, self.vocab_size, self.held_out, mark) for corpus in corpora]

    def opened(self, mark: Callable[[str], None] | None = None) -> Callable[[LaneOrder, int, LanePosition], Lane]:
        """Open the documents, and return a function that opens a lane."""
        documents, mixture = self.documents(mark), self.mixture
        if mixture is None:
            return partial(open_lane, documents[0], self.packing, self.seq_len)

        def open_mixed(order: LaneOrder, lane: int, position: LanePosition) -> Lane:
            def open_part(corpus: int, position: LanePosition) -> Lane:
                part_order = replace(order, seed=mixture.seed(order.seed, corpus))
                return open_lane(documents[corpus], self.packing, self.seq_len, part_order, lane, position)

            return MixedLane(mixture, open_part, order, lane, position)

        return open_mixed
