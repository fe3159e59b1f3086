"""Fixtures of the lane: ranks, a model of Hugging Face, and tasks of the harness from files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import text_model
from tests.support.ranks import ranks

__all__ = ["ranks"]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a model that nothing trained, with a tokenizer of its size."""
    return text_model(tmp_path_factory.mktemp("hf"))


def write_tasks(folder: Path, tasks: Mapping[str, str], questions: Iterable[Mapping[str, Any]]) -> None:
    """Write tasks `own_NAME` of the harness, which all take their questions from one file."""
    (folder / "data.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in questions), encoding="utf-8")
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder}/data.jsonl}}}}\ntest_split: test\n"
    for name, text in tasks.items():
        (folder / f"{name}.yaml").write_text(f"task: own_{name}\n{data}{text}", encoding="utf-8")
