"""A tokenizer that cannot be read now is not damaged."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from nxtrain.common import hf_files
from nxtrain.common.errors import DamagedError, StorageError
from nxtrain.tools.eval import trained


def test_storage_that_fails_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / hf_files.TOKENIZER).write_text("{", encoding="utf-8")
    with pytest.raises(DamagedError, match=r"tokenizer.json is damaged: it is not a Hugging Face tokenizer"):
        trained._open_tokenizer(tmp_path)
    monkeypatch.setattr(trained, "content_of", mock.Mock(side_effect=StorageError("it does not respond")))
    with pytest.raises(StorageError, match=r"^it does not respond$"):
        trained._open_tokenizer(tmp_path)
