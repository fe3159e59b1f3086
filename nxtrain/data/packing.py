"""From one long stream of tokens to rows of equal length."""

from __future__ import annotations

import numpy as np

from nxtrain.data.files import Tokens


def concat(stream: Tokens, seq_len: int) -> Tokens:
    """Cut a stream into rows without copying it: (T,) to (n, seq_len + 1), n = (T - 1) // seq_len.

    A row starts at the last token of the row before, so that each token is the target of exactly one position; only the
    first token and those behind the last full row are the target of none.
    """
    if stream.size <= seq_len:
        return stream[:0].reshape(0, seq_len + 1)
    return np.lib.stride_tricks.sliding_window_view(stream, seq_len + 1)[::seq_len]
