"""Global batch size and sequence length of each update.

Both are pure functions of the step. Both may grow in stages at the beginning of a run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class BatchSizes:
    """Global batch size of each update: the number of sequences over all data parallel ranks.

    Updates are numbered from 0: update `n` comes after `n` finished updates.

    Args:
        last: Global batch size after the last stage of the ramp.
        stages: Pairs of the first update after a stage, ascending, and the stage's global batch size.
        offset: Sequences that `before` adds to its count.
    """

    last: int
    stages: tuple[tuple[int, int], ...] = ()
    offset: int = 0

    @staticmethod
    def ramp(
        last: int, stages: Sequence[tuple[int, int]], seq_len: int, *, step: int = 0, tokens: int = 0
    ) -> BatchSizes:
        """Global batch sizes of a ramp whose stages end after given numbers of training tokens.

        A stage ends before the first update that begins with at least the stage's limit of tokens consumed. The number
        of consumed tokens is the only state of a ramp.

        Args:
            last: Global batch size after the ramp.
            stages: Pairs of the consumed tokens at the end of a stage, ascending, and the stage's global batch size.
            seq_len: Tokens of a sequence.
            step: Finished updates, from which the ramp continues.
            tokens: Tokens that the finished updates have consumed.
        """
        if not stages:
            return BatchSizes(last)
        ends = []
        end = step
        seen = tokens
        for limit, batch in stages:
            num_steps = max(0, -(-(limit - seen) // (batch * seq_len)))
            end, seen = end + num_steps, seen + num_steps * batch * seq_len
            ends.append((end, batch))
        sizes = BatchSizes(last, tuple(ends))
        return BatchSizes(last, tuple(ends), tokens // seq_len - sizes.before(step))

    @property
    def all(self) -> tuple[int, ...]:
        """Global batch sizes of all stages of the ramp, followed by the final one."""
        return (*(batch for _, batch in self.stages), self.last)

    @property
    def unit(self) -> int:
        """Greatest common divisor of all global batch sizes."""
        return math.gcd(*self.all)

    def at(self, step: int) -> int:
        """Global batch size of update `step`, counted from 0."""
        for end, batch in self.stages:
            if step < end:
                return batch
        return self.last

    def before(self, step: int) -> int:
        """Number of sequences that the first `step` updates consume."""
        rows, first = self.offset, 0
        for end, batch in (*self.stages, (step, self.last)):
            end_or_step = min(end, step)
            rows, first = rows + (end_or_step - first) * batch, end_or_step
        return rows

    def steps_for(self, rows: float) -> int:
        """Smallest number of updates that consume at least `rows` sequences."""
        begin = 0
        for end, batch in self.stages:
            if self.before(end) >= rows:
                return begin + math.ceil((rows - self.before(begin)) / batch)
            begin = end
        return begin + math.ceil((rows - self.before(begin)) / self.last)


@dataclass(frozen=True)
class EqualSteps:
    """A run of adjacent updates with equal global batch size and equal sequence length.

    Args:
        steps: Number of updates.
        global_batch: Rows of each update, over all data parallel ranks.
        seq_len: Tokens of a sequence; 0 if each row is one sequence.
    """

    steps: int
    global_batch: int
    seq_len: int = 0


@dataclass(frozen=True)
class SeqLengths:
    """Sequence length of each update. During a ramp, a row contains several shorter sequences.

    Args:
        last: Tokens of a row, which is also the sequence length after the last stage.
        stages: Pairs of the consumed tokens at the end of a stage, ascending, and the stage's sequence length.
        sizes: Global batch size of each update.
    """

    last: int
    stages: tuple[tuple[int, int], ...]
    sizes: BatchSizes

    def at(self, step: int) -> int:
        """Sequence length of update `step`, counted from 0."""
        seen = self.sizes.before(step) * self.last
        for limit, length in self.stages:
            if seen < limit:
                return length
        return self.last


def spans(steps: int, sizes: BatchSizes, lengths: SeqLengths | None = None) -> list[EqualSteps]:
    """Split the first `steps` updates into adjacent spans of equal global batch size and sequence length, in order.

    Args:
        steps: Number of updates.
        sizes: Global batch size of each update.
        lengths: Sequence length of each update; None if each row is one sequence.
    """
    ends = [end for end, _ in sizes.stages]
    if lengths is not None:
        ends += [sizes.steps_for(tokens / lengths.last) for tokens, _ in lengths.stages]
    bounds = sorted({0, steps, *(end for end in ends if 0 < end < steps)})
    results = []
    for begin, end in pairwise(bounds):
        seq_len = 0 if lengths is None else lengths.at(begin)
        results.append(EqualSteps(end - begin, sizes.at(begin), seq_len))
    return results
