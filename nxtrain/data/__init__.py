"""From text or token files to batches: corpora, tokenization, packing, the global sample order and the loader.

`open_data` turns the `[data]` section into samples; a `Loader` turns samples into batches. Nothing here keeps state: a
batch follows from the seed and the step alone, so resuming and changing the layout cannot change what is trained on.
"""

from __future__ import annotations

from nxtrain.data.dataset import Data, open_data
from nxtrain.data.loader import Batch, Loader
from nxtrain.data.samples import Samples, unigram_entropy

__all__ = ["Batch", "Data", "Loader", "Samples", "open_data", "unigram_entropy"]
