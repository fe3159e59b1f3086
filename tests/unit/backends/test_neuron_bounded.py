"""NKI's attention with bounds of keys per query computes attention inside of documents and windows.

References: the softmax by its formula in float64 (`tests/support/contract_ranges.py`). The kernels are stand-ins with
the signatures, layouts and conditions of the true ones (`tests/support/nki_bounded.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from nxtrain.backends.attention_choice import AttentionShape
from nxtrain.backends.neuron import bounded
from nxtrain.backends.neuron.attention import choose
from nxtrain.backends.neuron.bounded import BoundedKernels, launches, load
from nxtrain.backends.neuron.hardware import INSTANCES
from nxtrain.backends.neuron.sdk import SdkVersion
from nxtrain.backends.ranged_attention import RangedAttention, whole_rows
from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.common.kernels import KeyRanges
from tests.support import nki_bounded
from tests.support.contract_ranges import drawn_starts, exact_ranged

TRN1, TRN2 = INSTANCES["trn1.32xlarge"], INSTANCES["trn2.48xlarge"]
SHAPE = AttentionShape(1, 4096, 4, 128, "bf16", documents=True)
SDK = SdkVersion(2, 29)
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""Largest error by type, relative to the L2 norm."""


def largest_error(seed: int, dtype: torch.dtype, kernels: BoundedKernels) -> float:
    """Largest relative error of output and gradients of a drawn attention."""
    rng = Random(seed)
    batch, groups, size = rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((8, 16, 64))
    heads = groups * rng.choice((1, 2))
    generator = torch.Generator().manual_seed(seed)
    shapes = [(512, batch, number, size) for number in (heads, groups, groups, heads)]
    q, k, v, grad = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    ranges = whole_rows(q, drawn_starts(rng, batch, 512), rng.choice((None, 7, 200)))
    ours, wide = [x.clone().requires_grad_() for x in (q, k, v)], [x.double().requires_grad_() for x in (q, k, v)]
    out: Tensor = RangedAttention.apply(*ours, ranges, kernels)
    out.backward(grad)
    wanted, _ = exact_ranged(wide[0], wide[1], wide[2], ranges)
    wanted.backward(grad.double())
    pairs = [(out, wanted), *((x.grad, y.grad) for x, y in zip(ours, wide, strict=True))]
    errors = []
    for mine, exact in pairs:
        assert mine is not None
        assert exact is not None
        assert mine.dtype == dtype
        error = (mine.detach().double() - exact.detach()).norm() / exact.detach().norm()
        errors.append(float(error))
    return max(errors)


STAND_INS = BoundedKernels(*launches(nki_bounded.attention_cte, nki_bounded.attention_bwd), lnc=2)
TOGETHER = replace(STAND_INS, together=True)
"""Kernels of SDK 2.33, with bounds of each sequence."""


@pytest.mark.parametrize("kernels", [STAND_INS, TOGETHER], ids=["a call each", "together"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("seed", range(4))
def test_documents_and_windows_are_those_of_the_softmax(seed: int, dtype: torch.dtype, kernels: BoundedKernels) -> None:
    assert largest_error(seed, dtype, kernels) < TOLERANCE[dtype]


Bounds = Callable[..., tuple[Tensor, Tensor]]


def later(right: Bounds) -> Bounds:
    return lambda *given: (right(*given)[0] + 1, right(*given)[1])


def shorter(right: Bounds) -> Bounds:
    return lambda *given: (right(*given)[0], right(*given)[1] - 1)


def stale(right: Bounds) -> Bounds:
    def first(ranges: KeyRanges, batch: int) -> tuple[Tensor, Tensor]:
        low, high = right(ranges, batch)
        return low[:1].repeat(batch, 1), high

    return first


@pytest.mark.parametrize("kernels", [STAND_INS, TOGETHER], ids=["a call each", "together"])
@pytest.mark.parametrize("mutant", [later, shorter, stale])
def test_a_wrong_bound_is_noticed(
    mutant: Callable[[Bounds], Bounds], kernels: BoundedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "_bounds", mutant(bounded._bounds))
    errors = [largest_error(seed, torch.float32, kernels) for seed in range(4)]
    assert max(errors) > 100 * TOLERANCE[torch.float32]


def test_the_cores_of_a_logical_one_share_heads_that_divide() -> None:
    for kernel in (nki_bounded.attention_cte, nki_bounded.attention_bwd):
        kernel.cores.clear()
    q, kv = torch.randn(512, 3, 4, 8), torch.randn(512, 3, 2, 8)
    for keys, cores in ((kv, 2), (kv[:, :, :1], 1)):
        STAND_INS.attend(q, keys, keys, whole_rows(q, None))
        assert nki_bounded.attention_cte.cores == [cores] * 3, "a call for each sequence"
        nki_bounded.attention_cte.cores.clear()
        TOGETHER.attend(q, keys, keys, whole_rows(q, None))
        assert nki_bounded.attention_cte.cores == [2], "later kernels share sequences and positions as well"
        nki_bounded.attention_cte.cores.clear()


def test_the_kernels_are_taken_where_everything_fits() -> None:
    for wanted in ("auto", "flash"):
        found = choose(wanted, SHAPE, TRN2, SDK, None)
        assert (found.kind, found.lnc, found.is_flash) == ("bounded", 2, False)
        assert str(found).startswith(
            "bounded attention: data.doc_mask=true keeps documents apart, by the NKI Library's"
        )
    assert choose("plain", SHAPE, TRN2, SDK, None).kind == "blocked"
    windows = replace(SHAPE, documents=False, window=512, full_layers=1)
    mixed = choose("auto", windows, TRN2, SDK, None)
    assert mixed.kind == "bounded"
    assert "The first 1 layers have no window: blocked attention" in mixed.reason


@pytest.mark.parametrize(
    ("shape", "how", "obstacle"),
    [
        ({"seq_len": 4097}, {}, "train.seq_len=4097 is not a multiple of 512 up to 131,072"),
        ({"seq_len": 262144}, {}, "train.seq_len=262144 is not a multiple of 512 up to 131,072"),
        ({"head_size": 160}, {}, "heads are 160 wide, and they take 128 at most"),
        ({"num_heads": 1024}, {}, "1024 query heads per rank, and they take 512 at most"),
        ({"params": "fp32"}, {}, "they multiply in bf16"),
        ({"cp": 2}, {}, "parallel.cp=2 shares the positions of a sequence, and they take whole rows"),
        ({}, {"instance": TRN1}, "they select ranges by an instruction of Trn2"),
        ({}, {"sdk": SdkVersion(2, 30)}, "they are those of Neuron SDK 2.29, and this is 2.30"),
    ],
)
def test_each_obstacle_is_named(shape: dict[str, Any], how: dict[str, Any], obstacle: str) -> None:
    inputs = {"instance": TRN2, "sdk": SDK, "distributed": None, **how}
    changed = replace(SHAPE, **shape)
    found = choose("auto", changed, **inputs)
    assert found.kind == "blocked"
    assert obstacle in found.reason
    with pytest.raises(ConfigError, match="flash cannot be had"):
        choose("flash", changed, **inputs)


def test_kernels_are_those_of_the_library_or_an_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match="attention of its NKI Library cannot be imported"):
        load(1)
    for name, module in nki_bounded.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    q = torch.randn(512, 1, 2, 8)
    result = load(2).attend(q, q, q, whole_rows(q, None))
    assert all(map(torch.equal, result, STAND_INS.attend(q, q, q, whole_rows(q, None))))
