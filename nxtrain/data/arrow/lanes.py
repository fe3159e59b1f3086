"""Lanes of one prepared corpus or of a mixture of several, opened in a rank or in a worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nxtrain.common.errors import DataError
from nxtrain.common.io.object_store import Location
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.streams import Documents, open_lane
from nxtrain.data.mixture import Mixture
from nxtrain.data.order import shuffled
from nxtrain.data.stream_loader import Lane, LaneOrder, Place
from nxtrain.data.tokenization import TextTokenizer, load_tokenizer


class MixedLane:
    """Rows of several corpora by their shares; each row is of one corpus.

    The lanes share each block of as many rows as there are lanes, in an order drawn for each block. A lane therefore
    gets rows of every corpus, whatever the period of the mixture.

    Args:
        open_part: Opens the lane of a corpus by the number of the corpus and the position in the corpus.
        place: Rows that the lane has given, and the position in each corpus; an absent corpus begins.
    """

    def __init__(
        self, mixture: Mixture, open_part: Callable[[int, Place], Lane], order: LaneOrder, lane: int, place: Place
    ) -> None:
        self._mixture = mixture
        self._order, self._lane = order, lane
        self._given = place[0]
        num_corpora = len(mixture.shares)
        numbers = [*place[1:], *[0] * (2 * num_corpora)]
        self._parts = [
            open_part(corpus, (numbers[2 * corpus], numbers[2 * corpus + 1])) for corpus in range(num_corpora)
        ]

    @property
    def place(self) -> Place:
        """Position of the next row."""
        return self._given, *chain.from_iterable(part.place for part in self._parts)

    def row(self) -> NDArray[np.int32]:
        """Next row: (S + 1,) ids with `PROMPT_BIT` and `END_BIT`, `IGNORE_INDEX` after the last document."""
        lanes = self._order.lanes
        position = np.array([self._given * lanes + self._lane])
        corpora, _ = self._mixture.rows(self._given * lanes + shuffled(position, lanes, self._order.seed))
        self._given += 1
        return self._parts[int(corpora[0])].row()


def open_documents(
    corpus: PreparedCorpus,
    tokenizer: TextTokenizer | None,
    held_out: float,
    vocab_size: int,
    mark: Callable[[str], None] | None = None,
) -> Documents:
    """Documents of a corpus; ids need no tokenizer."""
    return Documents(corpus, None if corpus.is_ids else tokenizer, vocab_size, held_out, mark)


@dataclass(frozen=True)
class CorpusLanes:
    """Source of the lanes of prepared corpora.

    Args:
        identities: Identities of the corpora that were checked.
        mixture: Shares of several corpora; None for one.
        tokenizer: The `tokenizer.json` of text; None for ids only.
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
                raise DataError(
                    f"{corpus.path} is another corpus on this machine than on that which checked it; copy it anew"
                )
        tokenizer = load_tokenizer(self.tokenizer, self.vocab_size, self.end_of_text) if self.tokenizer else None
        return [open_documents(corpus, tokenizer, self.held_out, self.vocab_size, mark) for corpus in corpora]

    def opened(self, mark: Callable[[str], None] | None = None) -> Callable[[LaneOrder, int, Place], Lane]:
        """Open the documents; returns the function that opens a lane."""
        documents, mixture = self.documents(mark), self.mixture
        if mixture is None:
            return partial(open_lane, documents[0], self.packing, self.seq_len)

        def open_mixed(order: LaneOrder, lane: int, place: Place) -> Lane:
            def open_part(corpus: int, place: Place) -> Lane:
                part_order = replace(order, seed=mixture.seed(order.seed, corpus))
                return open_lane(documents[corpus], self.packing, self.seq_len, part_order, lane, place)

            return MixedLane(mixture, open_part, order, lane, place)

        return open_mixed
