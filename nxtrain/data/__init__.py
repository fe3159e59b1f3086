"""Data pipeline, from text or token files to batches: corpora, tokenization, packing, the sample order and the loader.

`open_data` turns the `[data]` section into samples; a `Loader` turns samples into batches. The pipeline has no state: a
batch is a function of the seed and the step. Resuming or changing the layout therefore does not change the batches.
"""

from __future__ import annotations

from nxtrain.data.dataset import Data, open_data
from nxtrain.data.held_out import target_bytes, unigram_entropy
from nxtrain.data.loader import Batch, BatchShare, Loader
from nxtrain.data.samples import Samples

__all__ = ["Batch", "BatchShare", "Data", "Loader", "Samples", "open_data", "target_bytes", "unigram_entropy"]
