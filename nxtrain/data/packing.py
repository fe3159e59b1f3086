"""Packing of one long stream of tokens into rows of equal length."""

from __future__ import annotations

import numpy as np

from nxtrain.data.files import Tokens


def concat(stream: Tokens, seq_len: int) -> Tokens:
    """Split a stream into rows without a copy: (T,) to (n, seq_len + 1), n = (T - 1) // seq_len.

    A row starts at the last token of the previous row, so that each token is the target of exactly one position. The
    first token, and tokens after the last full row, are the target of no position.
    """
    if stream.size <= seq_len:
        return stream[:0].reshape(0, seq_len + 1)
    return np.lib.stride_tricks.sliding_window_view(stream, seq_len + 1)[::seq_len]
