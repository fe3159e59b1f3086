"""Rows of pairs of answers: both answers of a pair are documents of one row, which is packed before training.

A prepared corpus of pairs has two documents for each pair: the chosen answer, then the rejected one. Each begins with
the prompt. Lengths are known from the offsets of the corpus, so that all rows are packed at the start. The rows of a
step then follow from its number, as those of a token file.
"""

from __future__ import annotations

import copy

import numpy as np
from numpy.typing import NDArray

from nxtrain.common.errors import DataError
from nxtrain.common.io.object_store import Location
from nxtrain.common.vocab import END_BIT, IGNORE_INDEX
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.streams import Documents, is_held_out
from nxtrain.data.packing import best_fit
from nxtrain.data.samples import Samples

Lengths = NDArray[np.int64]


class PairSamples(Samples):
    """Rows of whole pairs. A pair that is longer than a row is left out.

    Args:
        corpus: Prepared corpus of pairs.
        seq_len: Targets in a row.
        vocab_size: Size of the vocabulary; every id must be below it.
        pairs_per_row: Most pairs in a row.
        held_out: Share of the pairs that is held out, by a hash of their content.
        on_held_out_side: Take the pairs that are held out; otherwise the others.

    Attributes:
        num_pairs: Pairs in all rows.
        num_long: Pairs that are left out.

    Raises:
        DataError: No pair fits a row.
    """

    # 7 arguments: a corpus, its rows and its split
    def __init__(
        self,
        corpus: PreparedCorpus,
        *,
        seq_len: int,
        vocab_size: int,
        pairs_per_row: int,
        held_out: float = 0.0,
        on_held_out_side: bool = False,
    ) -> None:
        self.seq_len, self.pairs_per_row = seq_len, pairs_per_row
        self._corpus, self._vocab_size = corpus, vocab_size
        self._documents = Documents(corpus, None, vocab_size)
        self._reference: NDArray[np.float32] | None = None
        if len(corpus) % 2:
            raise DataError(f"{corpus.path} has {len(corpus):,} answers, and a pair has two; prepare it again")
        lengths = np.concatenate([*corpus.lengths()]).reshape(-1, 2).sum(axis=1)
        taken = np.arange(len(lengths))
        if held_out:
            sides = np.array([is_held_out(self._content(pair), held_out) for pair in taken.tolist()])
            taken = taken[sides == on_held_out_side]
        fitting = taken[lengths[taken] <= seq_len + 1]
        self.num_pairs, self.num_long = len(fitting), len(taken) - len(fitting)
        if not len(fitting):
            self._refuse(lengths[taken])
        packing = best_fit(lengths[fitting], seq_len + 1, most_pieces=pairs_per_row)
        self.num_rows = packing.num_rows
        self._pairs, self._begins = fitting[packing.documents], packing.begins
        self._first = np.searchsorted(packing.rows, np.arange(packing.num_rows + 1))

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows at indices: (n,) to (n, S + 1) marked ids; each answer ends with `END_BIT`."""
        table = np.full((indices.size, self.seq_len + 1), IGNORE_INDEX, np.int64)
        pieces = [self._pieces(row) for row in indices.tolist()]
        for piece in pieces:
            self._corpus.expect(_answers(self._pairs[piece]))
        for row, piece in zip(table, pieces, strict=True):
            for pair, begin in zip(self._pairs[piece].tolist(), self._begins[piece].tolist(), strict=True):
                contents = [self._corpus.content(document) for document in (2 * pair, 2 * pair + 1)]
                prompts = [self._corpus.prompt(2 * pair + side, content) for side, content in enumerate(contents)]
                end = begin
                for ids in self._documents.ids(contents, prompts):
                    row[end : end + ids.size] = ids
                    end += ids.size
                    row[end - 1] |= END_BIT
        return table

    def answers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Documents of rows: (n,) to (n, 2K), in the order of their positions; -1 where a row has fewer."""
        answers = np.full((indices.size, 2 * self.pairs_per_row), -1, np.int64)
        for number, row in enumerate(indices.tolist()):
            documents = _answers(self._pairs[self._pieces(row)])
            answers[number, : len(documents)] = documents
        return answers

    def reference(self, indices: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """Log-probabilities of the answers by the reference: (n,) to (n, 2K), 0 where a row has fewer."""
        if self._reference is None:
            return None
        answers = self.answers(indices)
        return np.where(answers < 0, np.float32(0), self._reference[answers])

    def with_reference(self, log_probs: NDArray[np.float32]) -> PairSamples:
        """The same rows with the log-probability of every document of the corpus by the reference."""
        samples = copy.copy(self)
        samples._reference = log_probs
        return samples

    def of_all_pairs(self) -> PairSamples:
        """Rows of the whole corpus, without a split."""
        return PairSamples(
            self._corpus, seq_len=self.seq_len, vocab_size=self._vocab_size, pairs_per_row=self.pairs_per_row
        )

    @property
    def location(self) -> Location:
        """Location of the corpus."""
        return self._corpus.path

    @property
    def identity(self) -> str:
        """Identity of the corpus."""
        return self._corpus.identity

    @property
    def num_documents(self) -> int:
        """Documents of the corpus, two for each pair."""
        return len(self._corpus)

    def _pieces(self, row: int) -> slice:
        return slice(int(self._first[row]), int(self._first[row + 1]))

    def _content(self, pair: int) -> bytes:
        return self._corpus.content(2 * pair) + self._corpus.content(2 * pair + 1)

    def _refuse(self, lengths: Lengths) -> None:
        path = self._corpus.path
        if not len(lengths):
            raise DataError(f"{path} has no pair on one side of data.validation_fraction; change the fraction")
        raise DataError(
            f"{path}: every pair is longer than a row, the shortest has {int(lengths.min()):,} tokens; "
            f"set train.seq_len={int(np.median(lengths)) - 1} or more, which half of the pairs fit"
        )


def check_pairs(corpus: PreparedCorpus, has_pairs: bool) -> None:
    """Refuse a corpus of pairs for another objective, and another corpus for an objective on pairs."""
    if has_pairs and not corpus.has_pairs:
        raise DataError(
            f"{corpus.path} holds no pairs, which finetune.objective=dpo and orpo compare; prepare them with "
            "nxtrain data prepare --pairs"
        )
    if corpus.has_pairs and not has_pairs:
        raise DataError(
            f"{corpus.path} holds pairs, whose rejected answers are not to be learned; set finetune.objective=dpo or "
            "orpo, or prepare the answers without --pairs"
        )


def _answers(pairs: Lengths) -> list[int]:
    """Documents of pairs, the chosen and the rejected answer of each."""
    documents: list[int] = (2 * pairs[:, None] + np.arange(2)).ravel().tolist()
    return documents
