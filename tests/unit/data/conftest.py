"""A run's data opened by one rank, and text to train on that has a structure and no repetition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nxtrain.config.schema import DataConfig
from nxtrain.data import Data, open_data

OpenAlone = Callable[..., Data]


@pytest.fixture
def open_alone(tmp_path: Path) -> OpenAlone:
    """Open data as the only rank, in `tmp_path/work`; takes the keys of `[data]`, `seq_len` and `vocab_size`."""

    def open_with(*, seq_len: int = 8, vocab_size: int = 300, **keys: Any) -> Data:
        return open_data(
            DataConfig(**keys),
            seq_len=seq_len,
            vocab_size=vocab_size,
            workdir=tmp_path / "work",
            leader=True,
            barrier=lambda: None,
        )

    return open_with


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
