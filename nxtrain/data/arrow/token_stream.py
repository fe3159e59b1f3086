"""Token file that a run writes once and reads in rows: a prepared corpus of token ids with marks and checksums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nxtrain.common.errors import DataError
from nxtrain.data.arrow.columns import ids_field, list_array, schema_of
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.work import Outputs, Position, PreparationWork
from nxtrain.data.samples import Samples
from nxtrain.data.storage import Tokens, refusing

MARKED = np.dtype(np.uint32)
"""Type of token ids with the marks `PROMPT_BIT` and `END_BIT`."""


def write_stream(path: Path, groups: Iterable[Sequence[Tokens]]) -> None:
    """Write documents as a token file, which gets its name when it is complete and synced to the disk.

    Args:
        groups: Groups of documents as ids with marks; each group becomes a record batch.
    """
    with refusing(path):
        outputs = Outputs(path)
        outputs.clear()
        schema = partial(schema_of, field=ids_field(MARKED), sources=path.stem)
        work = PreparationWork(outputs, {"sources": path.stem}, schema)
        try:
            work.open()
            for group in groups:
                work.add_batch([list_array(group, MARKED)], Position())
            work.finish({})
        finally:
            work.close()


def opened_before(path: Path) -> PreparedCorpus | None:
    """Open the corpus or token file that an earlier start wrote; None if it is absent or damaged."""
    try:
        if path.exists():
            return PreparedCorpus(path)
    except DataError:
        pass
    return None


class StreamSamples(Samples):
    """Rows of a token file, in which each row begins with the last token of the previous row."""

    def __init__(self, path: Path, seq_len: int) -> None:
        self._corpus, self.seq_len = PreparedCorpus(path), seq_len
        self.num_tokens = self._corpus.value_bytes // MARKED.itemsize
        self.num_rows = max(0, self.num_tokens - 1) // seq_len

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows with the given indices: (n,) to (n, S + 1)."""
        self._corpus.forget_changed()
        rows = np.empty((indices.size, self.seq_len + 1), np.int64)
        size = rows.shape[1] * MARKED.itemsize
        for number, index in enumerate(indices.tolist()):
            try:
                content = self._corpus.values(index * self.seq_len * MARKED.itemsize, size)
            except DataError as error:
                raise DataError(f"{error}: delete it, and the next start writes it again") from error
            rows[number] = np.frombuffer(content, MARKED)
        return rows
