"""Kernels of torch's attention: trials find wrong numbers, and the pinned order lasts until it is let go."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.compiler.config
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor

from nxtrain.backends import sdpa_kernels
from nxtrain.backends.sdpa_kernels import BACKENDS, failure, order, pinned
from nxtrain.common.errors import BackendError

CPU = torch.device("cpu")


def priority() -> list[int]:
    return torch._C._get_sdp_priority_order()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["flash", "plain"])
def test_a_right_kernel_passes_its_trial(kernel: str, dtype: torch.dtype) -> None:
    assert failure(kernel, CPU, dtype, 64) == ""


def test_a_kernel_that_the_device_lacks_fails_with_torchs_reason() -> None:
    assert "RuntimeError: No " in failure("cudnn", CPU, torch.bfloat16, 64)


def test_a_process_calls_cudnn_no_more_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 keeps the graph that it could not build, and the second call of the kernel ends the process."""
    calls: list[str] = []

    def refused(*given: Any, **how: Any) -> Tensor:
        calls.append("called")
        raise RuntimeError("no graph")

    monkeypatch.setattr(sdpa_kernels, "_failure_of_cudnn", cache(sdpa_kernels._failure_of_cudnn.__wrapped__))
    monkeypatch.setattr(F, "scaled_dot_product_attention", refused)
    assert [failure("cudnn", CPU, torch.bfloat16, 64) for _ in range(2)] == ["RuntimeError: no graph"] * 2
    assert len(calls) == 1
    assert failure("cudnn", CPU, torch.bfloat16, 128) == failure("flash", CPU, torch.bfloat16, 64)
    assert len(calls) == 3, "other heads and other kernels have trials of their own"


@pytest.mark.parametrize("wrong", ["no mask", "not a number", "no gradient of a key"])
def test_a_trial_finds_wrong_numbers(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = F.scaled_dot_product_attention

    def broken(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> Tensor:
        if q.dtype == torch.float32:
            return exact(q, k, v, **how)
        if wrong == "no mask":
            how["is_causal"] = False
        if wrong == "no gradient of a key":
            k = torch.cat([k[..., :-1, :], k[..., -1:, :].detach()], dim=-2) * 1.2
        out: Tensor = exact(q, k, v, **how)
        return out * float("nan") if wrong == "not a number" else out

    monkeypatch.setattr(F, "scaled_dot_product_attention", broken)
    assert "its numbers are off by" in failure("plain", CPU, torch.bfloat16, 64)


def test_a_pinned_kernel_comes_first_until_it_is_let_go() -> None:
    before, tag = priority(), torch.compiler.config.cache_key_tag
    for kernel in ("cudnn", "efficient", "plain"):
        with pinned(kernel):
            assert priority()[0] == BACKENDS[kernel].value
            assert torch.compiler.config.cache_key_tag == f"{tag}attention={kernel}"
            assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()
        assert (priority(), torch.compiler.config.cache_key_tag) == (before, tag)


def test_cudnn_comes_first_from_hopper_on() -> None:
    assert order((8, 9)) == order((7, 5)) == ("flash", "efficient")
    assert order((9, 0)) == order((12, 0)) == ("cudnn", "flash", "efficient")
    assert order((9, 0), deterministic=True) == ("flash", "efficient")


def test_other_releases_of_flash_attention_are_activated_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    attention = torch.nn.attention
    monkeypatch.setattr(attention, "activate_flash_attention_impl", calls.append, raising=False)
    monkeypatch.setattr(attention, "restore_flash_attention_impl", lambda: calls.append("restored"), raising=False)
    for kernel, name in (("flash3", "FA3"), ("flash4", "FA4")):
        with pinned(kernel):
            assert calls == [name]
            assert priority()[0] == BACKENDS["flash"].value
        assert calls == [name, "restored"]
        calls.clear()


def test_what_another_release_lacks_is_named_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = priority()
    monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl", raising=False)
    with pytest.raises(BackendError, match=r"flash3: torch .* has no activate_flash_attention_impl; use torch 2\.11"):
        sdpa_kernels.pinned("flash3").__enter__()

    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name}")

    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", missing, raising=False)
    with pytest.raises(BackendError, match=r"cannot activate FA4: No module named FA4; pip install flash-attn-4, or"):
        sdpa_kernels.pinned("flash4").__enter__()
    assert priority() == before
