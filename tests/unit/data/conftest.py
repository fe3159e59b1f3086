"""A run's data opened by one rank, and text to train on that has a structure and no repetition."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxtrain.config.schema import DataConfig
from nxtrain.data import Data, open_data

OpenAlone = Callable[..., Data]


def open_at(workdir: Path, *, seq_len: int = 8, vocab_size: int = 300, validation_rows: int = 0, **keys: Any) -> Data:
    """Open data as the only rank; takes the keys of `[data]`."""
    return open_data(
        DataConfig.model_validate(keys),
        seq_len=seq_len,
        vocab_size=vocab_size,
        workdir=workdir,
        leader=True,
        barrier=lambda: None,
        validation_rows=validation_rows,
    )


@pytest.fixture
def open_alone(tmp_path: Path) -> OpenAlone:
    """`open_at` in `tmp_path/work`."""
    return partial(open_at, tmp_path / "work")


@pytest.fixture
def folder_of_text(tmp_path: Path) -> Path:
    """Sixty files of random words, none alike."""
    random = np.random.default_rng(0)
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(60):
        words = random.choice(["alpha", "beta", "gamma", "delta", "epsilon"], size=80)
        (folder / f"{number:02}.txt").write_text(f"{number}: {' '.join(words)}\n")
    return folder
