"""Packing of one long stream of tokens into rows of equal length."""

from __future__ import annotations

import numpy as np

from nxtrain.data.files import Tokens


def concat(stream: Tokens, seq_len: int) -> Tokens:
    """Split a stream into rows without a copy: (T,) to (n, seq_len + 1), n = (T - 1) // seq_len.

    A row starts at the last token of the previous row. Each token is therefore the target of exactly one position,
    except for the first token and the tokens after the last full row, which are the target of none.
    """
    if stream.size <= seq_len:
        return stream[:0].reshape(0, seq_len + 1)
    return np.lib.stride_tricks.sliding_window_view(stream, seq_len + 1)[::seq_len]
