"""Corpora, tokenization, packing, the order of samples and the loader.

`open_data` turns the `[data]` section into samples, and a `Loader` turns samples into batches without any state: a
batch is a function of the seed and the step. For `source=arrow` they are `Streams` and a `StreamLoader`, whose state is
two numbers for each of its lanes. Resuming or changing the layout does not change the batches of either.
"""

from __future__ import annotations

from nxtrain.data.dataset import Data, open_data
from nxtrain.data.held_out import target_bytes, target_counts, unigram_entropy
from nxtrain.data.loader import Batch, BatchShare, Loader
from nxtrain.data.samples import Samples
from nxtrain.data.stream_loader import StreamLoader, Streams

__all__ = [
    "Batch",
    "BatchShare",
    "Data",
    "Loader",
    "Samples",
    "StreamLoader",
    "Streams",
    "open_data",
    "target_bytes",
    "target_counts",
    "unigram_entropy",
]
