"""Gradients of each kind of tensor in bf16 and fp16 are as exact as those of transformers, in drawn runs.

A norm over all tensors would not show a wrong gradient of a bias, a norm, a router or a sink.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from nxtrain.backends import open_backend
from nxtrain.backends.base import Backend
from nxtrain.parallel import linear
from tests.support.drawn import FAMILIES, OWN_SEED, SEED
from tests.support.drawn_fp16 import WORSE, root_mean_square
from tests.support.models import WITH_EXPERTS
from tests.support.narrow_gradients import Errors, errors_of_tensors

DRAWS = range(4)


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # shapes are small
    yield open_backend("cpu")
    torch.set_num_threads(threads)


def worse(errors: Errors) -> dict[str, tuple[float, float]]:
    """Kinds of tensors whose errors exceed those of transformers, with both."""
    kinds = {}
    for kind, pairs in errors.items():
        mine, theirs = (root_mean_square(of_all) for of_all in zip(*pairs, strict=True))
        if not mine <= 2 * WORSE * theirs:
            kinds[kind] = (mine, theirs)
    return kinds


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", [*FAMILIES, *WITH_EXPERTS])
def test_gradients_of_each_kind_of_tensor_are_as_exact_as_those_of_transformers(
    backend: Backend, family: str, dtype: torch.dtype
) -> None:
    errors = errors_of_tensors(backend, family, SEED, DRAWS, dtype)
    assert worse(errors) == {}


def test_a_gradient_of_a_bias_that_lacks_a_tenth_is_seen(backend: Backend) -> None:
    sound = linear._Biased.backward

    def smaller(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        of_x, of_bias = sound(ctx, grad)
        return of_x, of_bias * 0.9

    with patch.object(linear._Biased, "backward", staticmethod(smaller)):
        errors = errors_of_tensors(backend, "qwen2", OWN_SEED, DRAWS, torch.bfloat16)
    assert worse(errors).keys() == {"self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"}
