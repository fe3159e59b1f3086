"""A device says if it has products in float8, before a run starts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nxtrain.backends import float8_products
from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.common.errors import ConfigError
from nxtrain.common.kernels import Float8Matrix
from tests.support.float8 import RECIPES

CPU = torch.device("cpu")


class _Kernels(CpuKernels):
    """Kernels that ignore the scales of one matrix, or fail."""

    def __init__(self, error: str = "") -> None:
        self._error = error

    def float8_matmul(self, a: Float8Matrix, b: Float8Matrix, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
        if self._error:
            raise RuntimeError(self._error)
        return super().float8_matmul(a, Float8Matrix(b.values, torch.ones_like(b.scales)), dtype)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_trial_finds_old_gpus_errors_and_wrong_numbers(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failure(kernels: CpuKernels) -> str:
        return float8_products.failure(recipe, kernels, CpuKernels(), CPU, torch.bfloat16)

    capability = (8, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert "this GPU has 8.0" in failure(CpuKernels())
    capability = (10, 0)
    assert failure(CpuKernels()) == ""
    assert failure(_Kernels("no such kernel\nat all")) == "RuntimeError: no such kernel"
    assert "of the formula's" in failure(_Kernels())


def test_a_cpu_emulates_and_other_devices_refuse() -> None:
    backend = CpuBackend()
    backend.choose_float8("none", "bf16")
    assert not any("float8" in note for note in backend.notes())
    backend.choose_float8("rowwise", "bf16")
    assert any(note.startswith("float8: rowwise, emulated") for note in backend.notes())
    Backend.choose_float8(backend, "none", "bf16")
    with pytest.raises(ConfigError, match="cpu has no float8 matrix products"):
        Backend.choose_float8(backend, "rowwise", "bf16")
