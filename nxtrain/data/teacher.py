"""Data of knowledge distillation: a file with a teacher model's K most likely tokens for each target.

The file is a .npy table of integers, with one row for each row of token ids. A row has K x S token ids, then the K x S
probabilities of these tokens in units of 2^-24.

Source: Hinton et al. 2015 (arXiv:1503.02531) for the loss. Here the K probabilities are divided by their sum.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nxtrain.common.errors import DataError
from nxtrain.common.vocab import PROBABILITY_UNITS
from nxtrain.data.samples import FileSamples, Samples, header
from nxtrain.data.storage import DataFile


class DistillationSamples(Samples):
    """Rows of token ids whose targets are distributions over the true token and a teacher's K most likely tokens.

    Args:
        samples: The rows of token ids.
        teacher: The teacher's table, from `open_teacher`.
        vocab_size: Size of the vocabulary; every id of the teacher must be below it.
        weight: Share of the teacher's tokens in the loss.
    """

    def __init__(self, samples: Samples, teacher: FileSamples, *, vocab_size: int, weight: float) -> None:
        self._samples, self._teacher = samples, teacher
        self._vocab_size, self._weight = vocab_size, weight
        self.num_rows, self.seq_len = samples.num_rows, samples.seq_len
        self.teacher_k = (teacher.seq_len + 1) // (2 * samples.seq_len)
        if teacher.num_rows != samples.num_rows:
            reason = f"has {teacher.num_rows:,} rows, and data.path {samples.num_rows:,}"
            raise DataError(f"{teacher.name} {reason}; each row of ids has a row of the teacher")

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows with the given indices: (n,) to (n, S + 1)."""
        return self._samples.rows(indices)

    def with_teacher(self, targets: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Mix the targets of some rows with the teacher's tokens; see `Samples.with_teacher`.

        Raises:
            DataError: An id of the teacher is outside of the vocabulary.
        """
        stored = self._teacher.rows(indices).reshape(len(indices), 2, self.teacher_k, self.seq_len)
        ids, units = stored[:, 0], stored[:, 1]
        if ids.max(initial=0) >= self._vocab_size:
            reason = f"has the id {ids.max()}, outside of the vocabulary, 0 to {self._vocab_size - 1}"
            raise DataError(f"{self._teacher.name} {reason}; use a teacher with the tokenizer of data.path")
        return mixed(targets, ids, units, self._weight)


def open_teacher(file: DataFile, *, seq_len: int, k: int, expected: str | None = None) -> FileSamples:
    """Open the .npy table of a teacher with `k` tokens for each target.

    Raises:
        DataError: The file is not a table of `k` tokens for each of `seq_len` targets.
    """
    _, shape, _ = header(file)
    width = 2 * k * seq_len
    if len(shape) != 2 or shape[1] != width:  # noqa: PLR2004 - a table has 2 dimensions
        raise DataError(
            f"{file.name} has the shape {shape}; a row of data.teacher has 2 x data.teacher_k x train.seq_len = "
            f"2 x {k} x {seq_len} = {width} numbers"
        )
    return FileSamples(file, seq_len=width - 1, vocab_size=PROBABILITY_UNITS + 1, expected=expected)


def mixed(
    targets: NDArray[np.int64], ids: NDArray[np.int64], units: NDArray[np.int64], weight: float
) -> NDArray[np.int64]:
    """Mix true targets with a teacher's tokens into soft targets: (..., S) to (..., 2 (1 + K), S).

    The result has 1 + K token ids for each target, the true token first, and then their probabilities in units of
    2^-24. The probabilities of a target add up to 1 exactly. If all of the teacher's units are 0, the true token has
    probability 1.

    Args:
        targets: (..., S), true tokens, whose probability is 1 - `weight`.
        ids: (n, K, S), tokens of the teacher; n is the product of all dimensions of `targets` but the last.
        units: (n, K, S), probabilities of these tokens, in units of 2^-24.
        weight: Sum of the probabilities of the teacher's tokens in the result.
    """
    rows = targets.reshape(-1, 1, targets.shape[-1])
    sums = units.sum(axis=1, keepdims=True)
    shares = np.floor(units / np.maximum(sums, 1) * (weight * PROBABILITY_UNITS)).astype(np.int64)
    own = np.where(sums > 0, round((1 - weight) * PROBABILITY_UNITS), PROBABILITY_UNITS)
    # Units that are lost by rounding go to the first token of the teacher.
    shares[:, :1] += PROBABILITY_UNITS - own - shares.sum(axis=1, keepdims=True)
    result = np.concatenate([rows, ids, own, shares], axis=1)
    return result.reshape(*targets.shape[:-1], *result.shape[1:])
