"""Data of a run: corpora, tokenization, packing, order of samples, and the loader of batches.

`open_data` turns the `[data]` section into a `BatchSource`, from which each rank takes its batches. Batches of rows
come from a `Loader`, which has no state. A batch is a function of the seed and the step. Batches of documents come from
a `StreamLoader`, whose state is two numbers for each of its lanes. Neither a resume nor another parallel layout changes
a batch.
"""

from __future__ import annotations

from nxtrain.data.batch_source import Batches, BatchOrder, BatchSource, Streams
from nxtrain.data.dataset import Data, open_data
from nxtrain.data.held_out import target_bytes, target_counts, unigram_entropy
from nxtrain.data.loader import Batch, BatchShare, Loader
from nxtrain.data.samples import Samples
from nxtrain.data.stream_loader import StreamLoader

__all__ = [
    "Batch",
    "BatchOrder",
    "BatchShare",
    "BatchSource",
    "Batches",
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
