"""Rows of a run's data, read from the header of a token file, before a start reads the corpus."""

from __future__ import annotations

from pathlib import Path

from nxtrain.common.errors import DataError
from nxtrain.common.io.object_store import place_of
from nxtrain.config.schema import DataConfig
from nxtrain.data.dataset import read_prepared
from nxtrain.data.samples import check_shape, header
from nxtrain.data.storage import open_file


def count_rows(config: DataConfig, seq_len: int, vocab_size: int, workdir: Path) -> tuple[int, Path]:
    """Rows of `source=tokens`, or of text that an earlier start of the run has prepared.

    Args:
        config: The `[data]` section; its rows have an end.
        workdir: Folder of the prepared files.

    Returns:
        Number of rows, and the file that was read.

    Raises:
        DataError: The file is absent, in S3, or has rows of another length; or no start has prepared the text.
        StorageError: The storage fails.
    """
    place = place_of(config.path if config.source == "tokens" else read_prepared(config, seq_len, vocab_size, workdir))
    if not isinstance(place, Path):
        raise DataError(f"{place} is in S3, from which a start reads")
    dtype, shape, _ = header(open_file(place, Path()))
    if config.source == "tokens":
        check_shape(dtype, shape, place, seq_len)
        return shape[0], place
    return max(0, shape[0] - 1) // seq_len, place
