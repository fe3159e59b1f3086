"""Choice of attention on GPUs: trials, kernels that are asked for, and what replaces a kernel that fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from nxtrain.backends import (
    flash_ranges,
    flex_attention,
    sdpa_kernels,
)
from nxtrain.backends.attention_choice import AttentionShape
from nxtrain.common.errors import BackendError, ConfigError
from tests.support.attention_calls import Recorder, attend, opened, recorded_calls


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Recorder of the calls of this test."""
    with recorded_calls(monkeypatch) as recorder:
        yield recorder


@pytest.mark.parametrize(
    ("change", "fails", "kind"),
    [
        ({}, [flash_ranges], "flex"),
        ({}, [flash_ranges, flex_attention], "blocked"),
        ({"cp": 2}, [flash_ranges], "blocked"),
    ],
)
def test_where_a_kernel_fails_the_next_one_replaces_it(
    change: dict[str, Any], fails: list[ModuleType], kind: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for trials in fails:
        monkeypatch.setattr(trials, "failure", lambda *_: "RuntimeError: no kernel image")
    shape = replace(AttentionShape(1, 4096, 4, 128, "bf16", documents=True), **change)
    backend = opened("cuda")
    backend.choose_attention("auto", shape)
    assert backend.attention is not None and backend.attention.kind == kind
    assert "FlashAttention fails here: RuntimeError: no kernel image" in backend.attention.reason
    assert ("FlexAttention fails here" in backend.attention.reason) == (flex_attention in fails)
    attend(backend.kernels, shape)
    assert recorder.kinds == {kind}
    with pytest.raises(BackendError, match="attention=flash: FlashAttention fails here"):
        backend.choose_attention("flash", shape)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"params": "fp32"}, "takes bf16 and fp16"),
        ({"head_size": 4}, "heads are 4 wide"),
        ({"compiled": True}, "a graph has no offsets"),
        ({"cp_method": "gather", "cp_layout": "striped"}, "has no runs of queries"),
    ],
)
def test_ranks_that_share_a_row_go_block_by_block_where_flash_attention_does_not_serve(
    change: dict[str, Any], why: str, recorder: Recorder
) -> None:
    backend, shape = opened("cuda"), replace(CAUSAL, cp=2)
    backend.choose_attention("auto", shape)
    assert backend.attention is not None and backend.attention.kind == "flash"
    assert "outputs of several runs are joined" in backend.attention.reason
    backend.choose_attention("auto", replace(shape, **change))
    found = str(backend.attention)
    assert found.startswith("blocked attention: ")
    assert why in found


CAUSAL = AttentionShape(1, 1024, 4, 64, "bf16")


@pytest.mark.parametrize(("right", "failed"), [("cudnn", []), ("flash", ["cudnn"]), ("efficient", ["cudnn", "flash"])])
def test_the_first_kernel_whose_trial_is_right_is_pinned_and_announced(
    right: str, failed: list[str], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(sdpa_kernels, "failure", lambda kernel, *_: "" if kernel == right else "no kernel image")
    backend = opened("cuda")
    backend.choose_attention("auto", CAUSAL)
    assert backend.attention is not None and backend.attention.kind == right
    tried = [f"{other} fails here: no kernel image" for other in failed]
    assert backend.attention.reason.split("; ")[1:] == tried
    assert torch._C._get_sdp_priority_order()[0] == sdpa_kernels.BACKENDS[right].value


def test_where_no_kernel_is_right_auto_goes_block_by_block_and_a_wanted_one_ends_the_run(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa_kernels, "failure", lambda *_: "no kernel image")
    backend = opened("cuda")
    before = torch._C._get_sdp_priority_order()
    for params in ("bf16", "fp32"):
        backend.choose_attention("auto", replace(CAUSAL, params=params))
        assert backend.attention is not None and backend.attention.kind == "blocked"
        attend(backend.kernels, replace(CAUSAL, seq_len=4096))
        assert recorder.kinds == {"blocked"}
    with pytest.raises(BackendError, match=r"attention=cudnn cannot run on this GPU: .* no kernel image; use auto"):
        backend.choose_attention("cudnn", CAUSAL)
    assert torch._C._get_sdp_priority_order() == before


@pytest.mark.parametrize("wanted", ["sdpa", "cudnn", "flash", "flex", "plain"])
def test_a_kernel_that_is_asked_for_is_the_one_that_runs(wanted: str, recorder: Recorder) -> None:
    backend = opened("cuda")
    backend.choose_attention(wanted, CAUSAL)
    assert backend.attention is not None and backend.attention.kind == wanted
    attend(backend.kernels, CAUSAL)
    assert recorder.kinds == {"flex" if wanted == "flex" else "plain"}


@pytest.mark.parametrize(
    ("wanted", "change", "why"),
    [
        ("cudnn", {"params": "fp32"}, "takes bf16 and fp16"),
        ("flash3", {"params": "fp32"}, "takes bf16 and fp16"),
        ("sdpa", {"documents": True}, "sdpa takes no mask"),
        ("flash4", {"window": 16}, "a query sees 16 keys"),
        ("flash", {"cp": 2, "params": "fp32"}, "takes bf16 and fp16"),
        ("flash", {"documents": True, "head_size": 12}, "multiples of 8 up to 256"),
        ("flex", {"cp": 2}, "flex takes whole rows"),
        ("flex", {"head_size": 8}, "FlexAttention takes 16 at least"),
    ],
)
def test_a_kernel_that_cannot_compute_a_shape_is_refused(
    wanted: str, change: dict[str, Any], why: str, recorder: Recorder
) -> None:
    with pytest.raises(ConfigError, match=rf"backend\.attention: {wanted} cannot be had: .*{why}"):
        opened("cuda").choose_attention(wanted, replace(CAUSAL, **change))
