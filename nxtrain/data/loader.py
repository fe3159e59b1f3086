"""Loader of batches: a rank's share of each global batch as a pure function of the step, with prefetching."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nxtrain.common.batch_sizes import BatchSizes, SeqLengths
from nxtrain.common.vocab import DESIRABLE_BIT, END_BIT, ID_MASK, IGNORE_INDEX, PROMPT_BIT
from nxtrain.data.samples import Samples

_ORDERED_STEPS = 16
"""Number of steps whose row indices are computed in one call."""


@dataclass(frozen=True)
class Answers:
    """Positions and labels of the answers in a batch's rows, for preference objectives.

    For pairs, answers 2k and 2k + 1 of a row are the chosen and the rejected answer of pair k.

    Attributes:
        numbers: (num_micro, micro_batch, S) int64, index of the answer at each position, above all indices after the
            last.
        lengths: (num_micro, micro_batch, 2K) float32, number of targets of each answer; 0 for an absent answer.
        reference: (num_micro, micro_batch, 2K) float32, log-probabilities by the reference model, computed in advance.
        labels: (num_micro, micro_batch, 2K) float32, 1 for a desirable answer; None for pairs.
    """

    numbers: NDArray[np.int64]
    lengths: NDArray[np.float32]
    reference: NDArray[np.float32] | None = None
    labels: NDArray[np.float32] | None = None

    @staticmethod
    def of(rows: NDArray[np.int64], targets: NDArray[np.int64], pairs_per_row: int, labelled: bool) -> Answers:
        """Find the answers in rows in which each document is an answer.

        Args:
            rows: (n, S + 1) marked ids.
            targets: (num_micro, micro_batch, S) targets of the rows.
            pairs_per_row: Maximum number of pairs in a row, K.
            labelled: Answers have labels.
        """
        is_end = (rows[:, :-1] != IGNORE_INDEX) & (rows[:, :-1] & END_BIT != 0)
        numbers = np.cumsum(is_end, axis=1) - is_end
        num_answers = 2 * pairs_per_row
        is_target = (targets.reshape(numbers.shape) != IGNORE_INDEX) & (numbers < num_answers)
        of_rows = np.arange(len(numbers))[:, None] * num_answers + numbers
        lengths = np.bincount(of_rows[is_target], minlength=len(numbers) * num_answers).astype(np.float32)
        shape = (*targets.shape[:-1], num_answers)
        answers = Answers(numbers.reshape(targets.shape), lengths.reshape(shape))
        if not labelled:
            return answers
        ends = (rows != IGNORE_INDEX) & (rows & END_BIT != 0)
        ordinals = np.cumsum(ends, axis=1) - 1
        in_row, at = np.nonzero(ends)
        labels = np.zeros((len(rows), num_answers), np.float32)
        labels[in_row, ordinals[in_row, at]] = rows[in_row, at] & DESIRABLE_BIT != 0
        return replace(answers, labels=labels.reshape(shape))


def swap_answers(rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows in which each prompt has the answer of the previous prompt; the first prompt has the last answer.

    Documents of a row keep their number and the sum of their lengths. A row with a single answer becomes empty, since
    the row has no other answer.

    Args:
        rows: (n, S + 1) marked ids of answers after their prompts.
    """
    swapped = np.full_like(rows, IGNORE_INDEX)
    for row, changed in zip(rows, swapped, strict=True):
        tokens = row[row != IGNORE_INDEX]
        documents = np.split(tokens, np.flatnonzero(tokens & END_BIT) + 1)[:-1]
        if len(documents) < 2:  # noqa: PLR2004 - two answers to exchange
            continue
        prompts = [ids[ids & PROMPT_BIT != 0] for ids in documents]
        answers = [ids[ids & PROMPT_BIT == 0] for ids in documents]
        pieces = zip(prompts, [answers[-1], *answers[:-1]], strict=True)
        changed[: tokens.size] = np.concatenate(list(chain.from_iterable(pieces)))
    return swapped


@dataclass(frozen=True)
class Batch:
    """Inputs and targets of one data parallel rank for one step.

    Attributes:
        inputs: (num_micro, micro_batch, S) int64 token ids, S = seq_len.
        targets: Next token ids, or `IGNORE_INDEX` at positions without a loss, in the same shape. With a teacher,
            targets mixed with the teacher's tokens: (num_micro, micro_batch, 2R, S), see `nxtrain.data.teacher.mixed`.
        num_tokens: Number of this rank's targets other than `IGNORE_INDEX`.
        starts: First position of each position's document, for masks between documents, in the shape of `inputs`.
        answers: Positions of answers, for preference objectives; None otherwise.
        padding: True after the last document of a row, bool in the shape of `inputs`.
        swapped: For labelled answers, batch of the rows from `swap_answers`; None otherwise.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    num_tokens: int
    starts: NDArray[np.int64] | None = None
    answers: Answers | None = None
    padding: NDArray[np.bool_] | None = None
    swapped: Batch | None = None

    def without(self, is_left_out: NDArray[np.bool_]) -> Batch:
        """Copy of the batch without targets in the masked rows; the mask is (num_micro, micro_batch, 1)."""
        targets = np.where(is_left_out, IGNORE_INDEX, self.targets)
        answers, swapped = self.answers, self.swapped
        if answers is not None:
            answers = replace(answers, lengths=np.where(is_left_out, np.float32(0), answers.lengths))
        if swapped is not None:
            swapped = swapped.without(is_left_out)
        num_tokens = int(np.count_nonzero(targets != IGNORE_INDEX))
        return replace(self, targets=targets, num_tokens=num_tokens, answers=answers, swapped=swapped)


@dataclass(frozen=True)
class BatchShare:
    """One data parallel rank's share of the global batches.

    Args:
        global_batch: Rows in a step, over all ranks.
        micro_batch: Rows in a micro-batch of one rank; with dp_size it divides global_batch.
        dp_rank, dp_size: This rank's index on the data parallel axis, and the axis's size.
        ramp: Global batch size of each step; None if all steps have the same.
        lengths: Sequence length of each step; None if each row is one sequence in all steps.
    """

    global_batch: int
    micro_batch: int
    dp_rank: int = 0
    dp_size: int = 1
    ramp: BatchSizes | None = None
    lengths: SeqLengths | None = None

    def __post_init__(self) -> None:
        assert self.sizes.unit % (self.micro_batch * self.dp_size) == 0, self

    @property
    def sizes(self) -> BatchSizes:
        """Global batch size of each step, over all ranks."""
        return self.ramp or BatchSizes(self.global_batch)

    def seq_len(self, step: int) -> int:
        """Sequence length in tokens of a step, counted from 0; 0 if each row is one sequence in all steps."""
        return 0 if self.lengths is None else self.lengths.at(step)

    def progress(self, step: int) -> dict[str, float]:
        """Sequence length for the record of a step, counted from 1; empty without a ramp of the sequence length."""
        return {} if self.lengths is None else {"seq_len": self.lengths.at(step - 1)}


def batch_of(
    rows: NDArray[np.int64],
    micro_batch: int,
    *,
    end_id: int = 0,
    doc_mask: bool = False,
    seq_len: int = 0,
    pairs_per_row: int = 0,
    labelled: bool = False,
) -> Batch:
    """Build a batch from rows of token ids with document marks.

    The packer has marked the last token of each document. An id alone never ends a document, since the end-of-text id
    may occur in a text, and ends each turn of a conversation.

    Args:
        rows: (n, S + 1) ids with `PROMPT_BIT` and `END_BIT`, and `IGNORE_INDEX` after the last document.
        micro_batch: Rows of a micro-batch.
        end_id: Input id after the last document of a row, where there is no target.
        doc_mask: Add the starts of the documents, and remove the target after each document end, which is in the next
            document.
        seq_len: With `doc_mask`, tokens of each sequence in a row; 0 if each row is one sequence.
        pairs_per_row: Half of the maximum number of answers in a row; 0 for rows of other documents.
        labelled: Answers have labels.
    """
    inputs, targets = rows[:, :-1].copy(), rows[:, 1:].copy()
    is_padding = inputs == IGNORE_INDEX
    is_end = is_padding | (inputs & END_BIT != 0)
    if rows.max(initial=0) >= END_BIT:
        is_target = (targets != IGNORE_INDEX) & (targets & PROMPT_BIT == 0)
        targets = np.where(is_target, targets & ID_MASK, IGNORE_INDEX)
        inputs &= ID_MASK
    inputs[is_padding] = end_id
    shape = (-1, micro_batch, rows.shape[1] - 1)
    starts = None
    if doc_mask:
        targets[is_end] = IGNORE_INDEX
        begins = np.zeros_like(inputs)
        begins[:, 1:] = np.where(is_end[:, :-1], np.arange(1, inputs.shape[1]), 0)
        if seq_len:  # the target after a sequence is the next one's first token, as where rows are that short
            begins[:, ::seq_len] = np.arange(0, inputs.shape[1], seq_len)
        starts = np.maximum.accumulate(begins, axis=1).reshape(shape)
    num_tokens = int(np.count_nonzero(targets != IGNORE_INDEX))
    targets = targets.reshape(shape)
    answers = Answers.of(rows, targets, pairs_per_row, labelled) if pairs_per_row else None
    return Batch(inputs.reshape(shape), targets, num_tokens, starts, answers, is_padding.reshape(shape))


Skips = tuple[tuple[int, int], ...]
"""Pairs of a step and the number of batches that the run skips after this step, steps ascending."""


def left_out(skips: Skips, first: int, last: int) -> int:
    """Number of batches that are skipped after the steps from `first` to `last`."""
    return sum(number for step, number in skips if first <= step <= last)


def rows_left_out(skips: Skips, first: int, last: int, sizes: BatchSizes) -> int:
    """Number of rows in the batches that are skipped after the steps from `first` to `last`."""
    return sum(number * sizes.at(step) for step, number in skips if first <= step <= last)


@dataclass(frozen=True)
class RowPositions:
    """Positions of each step's rows in the endless order of rows.

    Args:
        sizes: Global batch size of each step.
        skips: Batches that the run skips, and that `origin` does not include.
        origin: Position of step 0; not 0 after a change of the global batch in the middle of a run.
    """

    sizes: BatchSizes
    skips: Skips = ()
    origin: int = 0

    def first(self, step: int) -> int:
        """Position of the first row of a step, counted from 0."""
        return self.origin + self.sizes.before(step) + rows_left_out(self.skips, 0, step, self.sizes)


class Loader:
    """Loader of batches from fixed rows, which assigns the endless order of rows to steps and ranks.

    Step k (from 0) covers positions [k * global_batch, (k + 1) * global_batch) of the order, counted from `origin`.
    With a ramp, the first position is the sum of the earlier steps' global batches. Data parallel rank d takes the d-th
    contiguous block of these positions. After the last row the next epoch begins, even in the middle of a batch.
    Neither micro_batch nor dp_size changes the rows of a step, and there is no state to save.

    Args:
        origin: Position of step 0; not 0 after a change of the global batch in the middle of a run.
        past_end: `wrap` continues with the next epoch after the last row. `pad` adds rows without targets, so that an
            evaluation counts each row once, and every batch has the same shape.
        skips: Batches that the run skips, and that `origin` does not include.
    """

    # 8 arguments: the order has its origin, its end and its gaps
    def __init__(
        self,
        samples: Samples,
        share: BatchShare,
        *,
        seed: int,
        shuffle: bool,
        origin: int = 0,
        doc_mask: bool = False,
        past_end: Literal["wrap", "pad"] = "wrap",
        skips: Skips = (),
    ) -> None:
        self._samples, self._share = samples, share
        self._seed, self._shuffle = seed, shuffle
        self._origin, self._past_end = origin, past_end
        self._doc_mask, self._skips = doc_mask, skips
        self._ordered: tuple[int, list[NDArray[np.int64]]] = -1, []

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps that cover every row at least once."""
        return -(-self._samples.num_rows // self._share.global_batch)

    def batch(self, step: int) -> Batch:
        """Batch of this rank for a step, counted from 0."""
        share, positions = self._share, self._positions(step)
        num_rows = self._samples.num_rows
        indices = self.indices(step)
        rows = self._samples.rows(indices)
        batch = self._batch(rows, indices, share.seq_len(step))
        if self._samples.labelled:
            batch = replace(batch, swapped=self._batch(swap_answers(rows), indices, swapped=True))
        if self._past_end == "pad" and (positions >= num_rows).any():
            return batch.without((positions >= num_rows).reshape(-1, share.micro_batch, 1))
        return batch

    def _batch(
        self, rows: NDArray[np.int64], indices: NDArray[np.int64], seq_len: int = 0, *, swapped: bool = False
    ) -> Batch:
        """Build a batch from rows, with the reference log-probabilities of answers if they are known."""
        samples = self._samples
        of_answers: dict[str, Any] = {"pairs_per_row": samples.pairs_per_row, "labelled": samples.labelled}
        batch = batch_of(rows, self._share.micro_batch, doc_mask=self._doc_mask, seq_len=seq_len, **of_answers)
        batch = replace(batch, targets=samples.with_teacher(batch.targets, indices))
        reference = samples.reference(indices, swapped=swapped)
        if batch.answers is None or reference is None:
            return batch
        reference = reference.reshape(batch.answers.lengths.shape)
        return replace(batch, answers=replace(batch.answers, reference=reference))

    def cursor(self) -> dict[int, tuple[int, ...]]:
        """Empty cursor, since the rows depend only on the step."""
        return {}

    def progress(self, step: int) -> dict[str, float]:
        """Data metrics for the record of a step, counted from 1: corpora of a mixture, and sequence length."""
        sizes = self._share.sizes
        passed = sizes.before(step) + rows_left_out(self._skips, 0, step - 1, sizes)
        return {**self._samples.progress(self._origin + passed), **self._share.progress(step)}

    def _positions(self, step: int) -> NDArray[np.int64]:
        """Positions of this rank's rows of a step (counted from 0) in the endless order."""
        share = self._share
        num_rows = share.sizes.at(step) // share.dp_size
        start = RowPositions(share.sizes, self._skips, self._origin).first(step) + share.dp_rank * num_rows
        return np.arange(start, start + num_rows)

    def indices(self, step: int) -> NDArray[np.int64]:
        """Row indices of a step, computed for several steps at once, since calls of numpy are expensive."""
        begin, indices = self._ordered  # read once: two threads may ask for steps that are far apart
        if begin != step - step % _ORDERED_STEPS:
            begin = step - step % _ORDERED_STEPS
            steps = range(begin, begin + _ORDERED_STEPS)
            positions = [self._positions(near) for near in steps]
            whole = self._samples.ordered(np.concatenate(positions), self._seed, shuffle=self._shuffle)
            indices = np.split(whole, np.cumsum([len(of_step) for of_step in positions])[:-1])
            self._ordered = begin, indices
        return indices[step - begin]

    def prefetched(self, start_step: int, depth: int = 2) -> Generator[Batch, None, None]:
        """Iterate endlessly over batches from step `start_step` on; a thread reads up to `depth` batches ahead.

        A read error is raised to the consumer at the step of the failed batch. Closing the generator ends the thread.
        """
        pool = ThreadPoolExecutor(1, thread_name_prefix="nxtrain-data")
        try:
            pending = deque(pool.submit(self.batch, start_step + ahead) for ahead in range(depth))
            step = start_step + depth
            while True:
                batch = pending.popleft().result()
                pending.append(pool.submit(self.batch, step))
                step += 1
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)
