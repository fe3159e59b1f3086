"""Training rows for preference objectives, packed before training: whole pairs of answers, or labelled answers.

A prepared corpus of pairs has two documents for each pair: the chosen answer, then the rejected one. A corpus of
labelled answers has one document for each. Each document begins with the prompt. Document lengths are known from the
corpus, so that all rows are packed at the start. The rows of a step then depend only on the step, as with a token file.
"""

from __future__ import annotations

import copy

import numpy as np
from numpy.typing import NDArray

from nxtrain.common.errors import DataError
from nxtrain.common.io.object_store import Location
from nxtrain.common.vocab import DESIRABLE_BIT, END_BIT, IGNORE_INDEX
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.streams import Documents, is_held_out
from nxtrain.data.packing import best_fit
from nxtrain.data.samples import AnswerRows, Samples

Lengths = NDArray[np.int64]


class PairSamples(Samples):
    """Rows of whole pairs, or of labelled answers. Each pair or labelled answer is an item; longer items are dropped.

    Args:
        corpus: Prepared corpus of pairs, or of labelled answers.
        seq_len: Targets in a row.
        vocab_size: Size of the vocabulary; every id must be below it.
        pairs_per_row: Half of the maximum number of answers in a row.
        held_out: Share of the items that is held out, by a hash of their content.
        on_held_out_side: Select the held-out items instead of the training items.

    Attributes:
        num_pairs: Number of items in all rows.
        num_long: Number of dropped items.
        split: Held-out share, and the selected side.

    Raises:
        DataError: No item fits a row.
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
        self.labelled, self.split = corpus.has_labels, (held_out, on_held_out_side)
        self._size, self._noun = 2, "pair"
        if self.labelled:
            self._size, self._noun = 1, "answer"
            self._is_desirable = corpus.labels()
        if len(corpus) % self._size:
            raise DataError(f"{corpus.path} has {len(corpus):,} answers, and a pair has two; prepare it again")
        lengths = np.concatenate([*corpus.lengths()]).reshape(-1, self._size).sum(axis=1)
        taken = np.arange(len(lengths))
        if held_out:
            sides = []
            for pair in taken.tolist():
                content = b"".join(map(corpus.content, self._answers(np.array([pair]))))
                sides.append(is_held_out(content, held_out))
            taken = taken[np.array(sides) == on_held_out_side]
        fitting = taken[lengths[taken] <= seq_len + 1]
        self.num_pairs, self.num_long = len(fitting), len(taken) - len(fitting)
        if not len(fitting):
            self._refuse(lengths[taken])
        packing = best_fit(lengths[fitting], seq_len + 1, most_pieces=2 * pairs_per_row // self._size)
        self.num_rows = packing.num_rows
        self._pairs, self._begins = fitting[packing.documents], packing.begins
        self._first = np.searchsorted(packing.rows, np.arange(packing.num_rows + 1))

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows with the given indices: (n,) to (n, S + 1) ids with marks; each answer ends with `END_BIT`."""
        table = np.full((indices.size, self.seq_len + 1), IGNORE_INDEX, np.int64)
        pieces = [self._pieces(row) for row in indices.tolist()]
        for piece in pieces:
            self._corpus.expect(self._answers(self._pairs[piece]))
        for row, piece in zip(table, pieces, strict=True):
            for pair, begin in zip(self._pairs[piece].tolist(), self._begins[piece].tolist(), strict=True):
                documents = range(self._size * pair, self._size * (pair + 1))
                contents = [self._corpus.content(document) for document in documents]
                named = zip(documents, contents, strict=True)
                prompts = [self._corpus.prompt(document, content) for document, content in named]
                end = begin
                for document, ids in zip(documents, self._documents.ids(contents, prompts), strict=True):
                    row[end : end + ids.size] = ids
                    end += ids.size
                    row[end - 1] |= END_BIT
                    if self.labelled and self._is_desirable[document]:
                        row[end - 1] |= DESIRABLE_BIT
        return table

    def answers(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Document indices of the answers in rows: (n,) to (n, 2K), in row order; -1 for an absent answer."""
        answers = np.full((indices.size, 2 * self.pairs_per_row), -1, np.int64)
        for number, row in enumerate(indices.tolist()):
            documents = self._answers(self._pairs[self._pieces(row)])
            answers[number, : len(documents)] = documents
        return answers

    def reference(self, indices: NDArray[np.int64], *, swapped: bool = False) -> NDArray[np.float32] | None:
        """Log-probabilities of the answers by the reference model: (n,) to (n, 2K), 0 for an absent answer."""
        if self._reference is None:
            return None
        answers = self.answers(indices)
        of_kind: NDArray[np.float32] = self._reference[int(swapped)]
        return np.where(answers < 0, np.float32(0), of_kind[answers])

    def with_reference(self, log_probs: NDArray[np.float32]) -> PairSamples:
        """Copy of the rows with the reference model's log-probabilities of the corpus's documents, (kinds, documents).

        For labelled answers, the second kind is for the answer that `swap_answers` puts after the document's prompt.
        """
        samples = copy.copy(self)
        samples._reference = log_probs
        return samples

    def of_all_pairs(self) -> PairSamples:
        """Rows of the whole corpus without a split; for labelled answers, the same rows with swapped answers."""
        if self.labelled:
            return self
        return PairSamples(
            self._corpus, seq_len=self.seq_len, vocab_size=self._vocab_size, pairs_per_row=self.pairs_per_row
        )

    @property
    def location(self) -> Location:
        """Path or address of the corpus."""
        return self._corpus.path

    @property
    def identity(self) -> str:
        """Identity of the corpus, from its sources, settings and sizes."""
        return self._corpus.identity

    @property
    def num_documents(self) -> int:
        """Number of documents of the corpus, two for each pair."""
        return len(self._corpus)

    def describe(self) -> str:
        """Amount of the data, as text."""
        amount = f"{self.num_pairs:,} {self._noun}s"
        if self.labelled:
            amount += f", of which {int(self._is_desirable[self._pairs].sum()):,} are desirable,"
        if self.num_long:
            amount += f" without {self.num_long:,} that are longer than a row,"
        return f"{amount} in {self.num_rows:,} rows"

    def _pieces(self, row: int) -> slice:
        return slice(int(self._first[row]), int(self._first[row + 1]))

    def _answers(self, pairs: Lengths) -> list[int]:
        """Document indices of items: the chosen and the rejected answer of each pair, or each labelled answer."""
        documents: list[int] = (self._size * pairs[:, None] + np.arange(self._size)).ravel().tolist()
        return documents

    def _refuse(self, lengths: Lengths) -> None:
        path = self._corpus.path
        if not len(lengths):
            raise DataError(
                f"{path} has no {self._noun} in one part of the split by data.validation_fraction; change the fraction"
            )
        raise DataError(
            f"{path}: every {self._noun} is longer than a row, the shortest has {int(lengths.min()):,} tokens; "
            f"set train.seq_len={int(np.median(lengths)) - 1} or more, which half of the {self._noun}s fit"
        )


def check_answers(corpus: PreparedCorpus, answers: AnswerRows | None) -> None:
    """Raise a DataError unless the corpus fits the objective: pairs, labelled answers, or other documents."""
    wants_labels = answers is not None and answers.labelled
    wants_pairs = answers is not None and not answers.labelled
    if wants_pairs and not corpus.has_pairs:
        raise DataError(
            f"{corpus.path} holds no pairs, which finetune.objective=dpo and orpo compare; prepare them with "
            "nxtrain data prepare --pairs"
        )
    if wants_labels and not corpus.has_labels:
        raise DataError(
            f"{corpus.path} holds no labelled answers, which finetune.objective=kto takes; prepare them with "
            "nxtrain data prepare --labels"
        )
    if corpus.has_pairs and not wants_pairs:
        raise DataError(
            f"{corpus.path} holds pairs, whose rejected answers are not to be learned; set finetune.objective=dpo or "
            "orpo, or prepare the answers without --pairs"
        )
    if corpus.has_labels and not wants_labels:
        raise DataError(
            f"{corpus.path} holds labelled answers, of which some are not to be learned; set finetune.objective=kto, "
            "or prepare the answers without --labels"
        )
