"""Global batch and sequence length of each step: pure functions of the step, with ramps at the begin of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class BatchSizes:
    """Sequences of each update, over all data parallel ranks.

    An update is named by the number of finished updates before it, so that the first is 0.

    Args:
        last: Global batch after the stages of the ramp.
        stages: Update before which each stage ends, ascending, and the stage's global batch.
        offset: Sequences that `before` counts in addition.
    """

    last: int
    stages: tuple[tuple[int, int], ...] = ()
    offset: int = 0

    @staticmethod
    def ramp(
        last: int, stages: Sequence[tuple[int, int]], seq_len: int, *, step: int = 0, tokens: int = 0
    ) -> BatchSizes:
        """Sizes of a ramp by tokens, from a step on.

        A stage ends before the first update that begins with so many tokens seen, or more. The number of tokens that
        were seen is the only state of a ramp.

        Args:
            last: Global batch after the ramp.
            stages: Tokens of all updates at the end of each stage, ascending, and the stage's global batch.
            seq_len: Tokens of a sequence.
            step: Finished updates.
            tokens: Tokens that these updates have seen.
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
        """The global batches of all stages, and the last."""
        return (*(batch for _, batch in self.stages), self.last)

    @property
    def unit(self) -> int:
        """Largest number of sequences that divides every global batch."""
        return math.gcd(*self.all)

    def at(self, step: int) -> int:
        """Global batch of the update after `step` others."""
        for end, batch in self.stages:
            if step < end:
                return batch
        return self.last

    def before(self, step: int) -> int:
        """Sequences of the first `step` updates."""
        rows, first = self.offset, 0
        for end, batch in self._bounded(step):
            rows, first = rows + (end - first) * batch, end
        return rows

    def steps_for(self, rows: float) -> int:
        """Fewest updates that consume a number of sequences."""
        begin = 0
        for end, batch in self.stages:
            if self.before(end) >= rows:
                return begin + math.ceil((rows - self.before(begin)) / batch)
            begin = end
        return begin + math.ceil((rows - self.before(begin)) / self.last)

    def _bounded(self, step: int) -> Iterator[tuple[int, int]]:
        """The stages up to a step, and the last global batch until this step."""
        for end, batch in self.stages:
            if end >= step:
                yield step, batch
                return
            yield end, batch
        yield step, self.last


@dataclass(frozen=True)
class EqualSteps:
    """Adjacent updates of the same size.

    Args:
        steps: Number of updates.
        global_batch: Rows of each of them.
        seq_len: Tokens of a sequence; 0: a row is one.
    """

    steps: int
    global_batch: int
    seq_len: int = 0


@dataclass(frozen=True)
class SeqLengths:
    """Sequence length of each update. A row of the last length holds several shorter sequences.

    Args:
        last: Tokens of a row, and of a sequence after the stages.
        stages: Tokens seen before the first update that has left each stage, ascending, and the stage's length.
        sizes: Rows of each update.
    """

    last: int
    stages: tuple[tuple[int, int], ...]
    sizes: BatchSizes

    def at(self, step: int) -> int:
        """Sequence length of the update after `step` others."""
        seen = self.sizes.before(step) * self.last
        for limit, length in self.stages:
            if seen < limit:
                return length
        return self.last


def spans(steps: int, sizes: BatchSizes, lengths: SeqLengths | None = None) -> list[EqualSteps]:
    """Updates of each size among the first `steps`, in order.

    Args:
        steps: Number of updates.
        sizes: Rows of each update.
        lengths: Sequence length of each update; None: a row is one sequence.
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
