"""Rules of the kernels of attention, and of kernels that repeat their bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.test_check import checked, only


@pytest.mark.parametrize(
    ("overrides", "key", "text"),
    [
        (
            "backend.attention=flex backend.name=neuron",
            "backend.attention",
            "backend.name=cuda, not of neuron",
        ),
        ("backend.attention=cudnn backend.name=cpu", "backend.attention", "use auto or plain"),
        (
            "backend.attention=flash backend.name=xla",
            "backend.attention",
            "neuron and neuron-native, not of xla",
        ),
        (
            "backend.deterministic=true backend.name=xla",
            "backend.deterministic",
            "torch kernels for GPUs",
        ),
        ("backend.deterministic=true backend.attention=cudnn", "backend.attention", "which cudnn does not guarantee"),
    ],
)
def test_what_a_backend_lacks_is_refused(tmp_path: Path, overrides: str, key: str, text: str) -> None:
    result = only(tmp_path, *overrides.split())
    assert result.key == key
    assert text in f"{result.reason} {result.hint}"


@pytest.mark.parametrize(
    "overrides",
    [
        *(f"backend.attention={kernel} backend.name=cuda" for kernel in ("sdpa", "cudnn", "flash3", "flex", "plain")),
        *(f"backend.deterministic=true backend.name={name}" for name in ("auto", "cpu", "cuda")),
        "backend.deterministic=true backend.attention=flash backend.name=cuda",
        "backend.attention=cudnn backend.name=auto",
    ],
)
def test_what_a_backend_has_is_taken(tmp_path: Path, overrides: str) -> None:
    checked(tmp_path, *overrides.split())
