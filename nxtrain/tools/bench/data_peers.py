"""Other loaders that `nxtrain bench data` measures next to ours, each only where its package is installed.

Each does what its documentation shows, in one process, with the tokenizer and the documents of our sides. Verified with
datasets 5.2.0, torchtitan 0.3.0 and mosaicml-streaming 0.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

MAP = "datasets.map"
TITAN = "torchtitan"
STREAMING = "mosaicml-streaming"

_IMPORTED = {MAP: ("datasets",), TITAN: ("datasets", "torchtitan"), STREAMING: ("streaming",)}
"""Packages that each needs, by their import names."""

_BATCH = 32

Side = Callable[[], int]
"""One turn of an implementation; returns the targets that the turn has read."""

TextSide = Callable[[Tokenizer], int]
"""One turn of an implementation that tokenizes text; returns the targets of the turn."""


def absent() -> dict[str, str]:
    """Peers that are left out, each with the command that brings it."""
    packages = {"streaming": STREAMING}
    commands = {}
    for name, modules in _IMPORTED.items():
        missing = [packages.get(module, module) for module in modules if find_spec(module) is None]
        if missing:
            commands[name] = f"pip install {' '.join(missing)}"
    return commands


def text_sides(texts: Sequence[str], end_id: int, seq_len: int, folder: Path) -> dict[str, TextSide]:
    """Peers that tokenize documents, and give rows of seq_len + 1 ids.

    Args:
        texts: The documents.
        end_id: Id of the token that ends a document.
        seq_len: Targets in a row.
        folder: Folder for what the peers write.
    """
    if {MAP, TITAN} <= absent().keys():
        return {}
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": list(texts)}).save_to_disk(str(folder / "datasets"))
    corpus = datasets.load_from_disk(str(folder / "datasets"))
    makers: Mapping[str, Callable[[Any, int, int], TextSide]] = {MAP: _mapped, TITAN: _titan}
    return {name: make(corpus, end_id, seq_len) for name, make in makers.items() if name not in absent()}


def _mapped(corpus: Any, end_id: int, seq_len: int) -> TextSide:
    """Batches of 1,000 documents tokenized and cut by `map` into a file, whose rows are then read in order."""

    def act(tokenizer: Tokenizer) -> int:
        def cut(batch: Mapping[str, list[str]]) -> dict[str, list[list[int]]]:
            encoded = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
            stream = list(chain.from_iterable([*document.ids, end_id] for document in encoded))
            width = seq_len + 1
            return {"ids": [stream[begin : begin + width] for begin in range(0, len(stream) - width + 1, width)]}

        rows = corpus.map(cut, batched=True, remove_columns=["text"], load_from_cache_file=False)
        return sum(batch["ids"][:, 1:].size for batch in rows.with_format("numpy").iter(_BATCH))

    return act


def _titan(corpus: Any, end_id: int, seq_len: int) -> TextSide:
    """torchtitan's dataset, which tokenizes one document at a time and keeps lists of ids."""
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset

    @dataclass
    class Titan:
        tokenizer: Tokenizer

        def encode(self, text: str, *_: object, **__: object) -> list[int]:
            return [*self.tokenizer.encode(text, add_special_tokens=False).ids, end_id]

    DATASETS["nxtrain"] = DatasetConfig("nxtrain", lambda path: corpus, lambda sample: sample["text"])

    def act(tokenizer: Tokenizer) -> int:
        rows = HuggingFaceTextDataset("nxtrain", None, Titan(tokenizer), seq_len)
        return sum(labels.numel() for _, labels in rows)

    return act


def ids_sides(rows: NDArray[np.integer[Any]], folder: Path) -> dict[str, Side]:
    """Peers that read rows of ids in a random order.

    Args:
        rows: (num_rows, S + 1) ids.
        folder: Folder for what the peers write.
    """
    if STREAMING in absent():
        return {}
    import streaming

    local = str(folder / "streaming")
    with streaming.MDSWriter(out=local, columns={"ids": f"ndarray:{rows.dtype}"}) as writer:
        for row in rows:
            writer.write({"ids": row})
    samples = streaming.StreamingDataset(local=local, shuffle=True, batch_size=_BATCH)

    def act() -> int:
        rows_of_samples = (sample["ids"] for sample in samples)
        return sum(batch.size for batch in _batches(rows_of_samples))

    return {STREAMING: act}


def _batches(rows: Iterator[NDArray[Any]]) -> Iterator[NDArray[np.int64]]:
    """Targets of each batch of rows."""
    held: list[NDArray[Any]] = []
    for row in rows:
        held.append(row)
        if len(held) == _BATCH:
            yield np.stack(held)[:, 1:].astype(np.int64)
            held.clear()
