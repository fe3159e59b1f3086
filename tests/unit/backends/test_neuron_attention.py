"""When a run on PyTorch/XLA has NKI's flash kernel, and that the layout around it keeps attention what it is.

Reference: torch's attention in float64. The kernel is a fake, of elementary operations, with the signature and layouts
of NxD's function in src/neuronx_distributed/kernels/flash_attn.py of v0.18.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nxtrain.backends.attention_choice import AttentionChoice, AttentionShape
from nxtrain.backends.cpu import CpuBackend
from nxtrain.backends.neuron import backend as neuron
from nxtrain.backends.neuron import sdk
from nxtrain.backends.neuron.attention import choose
from nxtrain.backends.neuron.backend import NeuronBackend, NeuronKernels
from nxtrain.backends.neuron.flash import flash_attention, load
from nxtrain.backends.neuron.hardware import INSTANCES
from nxtrain.backends.neuron.sdk import Package, SdkVersion
from nxtrain.backends.xla.backend import XlaBackend, XlaKernels
from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.train.command import train_on
from nxtrain.train.context import RunContext
from tests.support.models import plan
from tests.support.runs import run_plan, token_file

SDK = SdkVersion(2, 28)
NXD = Package("neuronx-distributed", "0.17.26814")
TRN1, TRN2 = INSTANCES["trn1.32xlarge"], INSTANCES["trn2.48xlarge"]
SHAPE = AttentionShape(micro_batch=1, seq_len=4096, num_heads=4, head_size=128, params="bf16")
MODULE = "neuronx_distributed.kernels.flash_attn"


def fake_nki_flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lnc: int = 1,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = True,
    mixed_precision: bool = True,
    seed: Tensor | None = None,
    hardware_type: object = None,
    transpose_nki_inputs: bool = True,
) -> Tensor:
    """Plain attention in NxD's layouts: three (B, N, H, S) to (B, N, S, H)."""
    assert q.shape == k.shape == v.shape, "one key/value head per query head"
    assert (causal, mixed_precision, transpose_nki_inputs, dropout_p) == (True, True, True, 0.0)
    assert q.shape[1] % lnc == 0
    assert softmax_scale is not None
    scores = q.transpose(2, 3) @ k * softmax_scale
    ahead = torch.ones(q.shape[3], q.shape[3], dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(ahead, -9984.0), dim=-1) @ v.transpose(2, 3)


def test_the_kernel_is_taken_where_everything_fits() -> None:
    for wanted in ("auto", "flash"):
        actual = choose(wanted, SHAPE, TRN1, SDK, NXD)
        assert actual == AttentionChoice("flash", "NKI's kernel of neuronx-distributed 0.17.26814, Neuron SDK 2.28")
        assert str(actual).startswith("flash attention: NKI's kernel")
    assert choose("auto", SHAPE, TRN2, SDK, NXD).lnc == 2


def test_plain_attention_is_taken_when_asked_for_and_told_its_cost() -> None:
    result = choose("plain", replace(SHAPE, seq_len=2048), TRN1, SDK, NXD)
    assert not result.is_flash
    cost = "Each block's scores take 32 MiB (micro_batch x heads per rank x seq_len^2 x 2 bytes)"
    assert str(result) == f"plain attention: as backend.attention=plain asks; {cost}"
    result = choose("plain", SHAPE, TRN1, SDK, NXD)
    assert str(result).startswith("blocked attention: as backend.attention=plain asks; Each of 8 blocks of 512 queries")


@pytest.mark.parametrize(
    ("shape", "how", "obstacle"),
    [
        ({"seq_len": 4095}, {}, "train.seq_len=4095 is not a multiple of 2048"),
        ({"head_size": 160}, {}, "heads are 160 wide, and NKI's kernel takes 128 at most"),
        ({"params": "fp32"}, {}, "multiplies in bf16, which precision.params=fp32 does not ask for"),
        ({"num_heads": 1}, {"instance": TRN2}, "1 query heads per rank do not divide over the 2 physical cores"),
        ({}, {"sdk": SdkVersion(2, 30)}, "the compiler of Neuron SDK 2.30 refuses NKI kernels of the old namespace"),
        ({}, {"sdk": None}, "no known release of the Neuron SDK is installed"),
        ({}, {"instance": None}, "this machine is not a Trainium instance"),
        ({}, {"distributed": None}, "neuronx-distributed 0.17, which calls NKI's kernel, is not installed"),
        ({}, {"distributed": Package("neuronx-distributed", "0.1", True)}, "0.1 is PyPI's empty placeholder"),
    ],
)
def test_each_obstacle_is_named_and_refuses_a_kernel_that_is_insisted_on(
    shape: dict[str, Any], how: dict[str, Any], obstacle: str
) -> None:
    changed = replace(SHAPE, **shape)
    inputs = {"instance": TRN1, "sdk": SDK, "distributed": NXD, **how}
    result = choose("auto", changed, **inputs)
    assert not result.is_flash
    assert obstacle in result.reason
    with pytest.raises(ConfigError, match=r"backend\.attention.*flash cannot be had") as refused:
        choose("flash", changed, **inputs)
    assert obstacle in refused.value.problems[0].reason


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("lnc", [1, 2])
def test_attention_around_the_kernel_is_that_of_torch(kv_heads: int, lnc: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(12, 3, heads, 8) for heads in (4, kv_heads, kv_heads, 4)]
    q, k, v, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    ours, theirs = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in range(2))
    out = flash_attention(fake_nki_flash_attn_func, lnc, *ours)
    queries, keys, values = (x.permute(1, 2, 0, 3) for x in theirs)
    wanted = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True).permute(2, 0, 1, 3)
    out.backward(grad)
    wanted.backward(grad)
    assert out.shape == q.shape
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> NeuronBackend:
    """One on a trn2 with NxD's function, claiming no device."""
    module = ModuleType(MODULE)
    module.nki_flash_attn_func = fake_nki_flash_attn_func  # type: ignore[attr-defined]
    for name in ("neuronx_distributed", "neuronx_distributed.kernels"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(XlaKernels, "__init__", lambda _: None)
    monkeypatch.setattr(XlaBackend, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(neuron, "this_machine", lambda: TRN2)
    monkeypatch.setattr(sdk, "detect", lambda: SDK)
    monkeypatch.setattr(sdk, "installed", lambda _: NXD)
    return NeuronBackend()


def test_the_backend_chooses_once_and_says_so(backend: NeuronBackend) -> None:
    assert backend.notes() == ()
    backend.choose_attention("auto", SHAPE)
    kernels = backend.kernels
    assert isinstance(kernels, NeuronKernels)
    assert (kernels.flash, kernels.lnc, kernels.rounds) == (fake_nki_flash_attn_func, 2, False)
    assert backend.notes() == ("flash attention: NKI's kernel of neuronx-distributed 0.17.26814, Neuron SDK 2.28",)
    q = torch.randn(6, 1, 4, 8)
    taken = [kernels.attention(q, q[:, :, :2], q[:, :, :2])]
    backend.choose_attention("plain", SHAPE)
    taken.append(backend.kernels.attention(q, q[:, :, :2], q[:, :, :2]))
    torch.testing.assert_close(*taken)
    assert backend.notes()[0].startswith("blocked attention: as backend.attention=plain asks")


def test_a_function_that_cannot_be_imported_is_an_error_and_no_silent_change(
    backend: NeuronBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    with pytest.raises(BackendError, match=r"flash attention cannot be imported: .*backend\.attention=plain"):
        backend.choose_attention("auto", SHAPE)
    with pytest.raises(BackendError):
        load()


def test_a_variable_by_which_nxd_would_keep_its_sums_in_bf16_is_refused(
    backend: NeuronBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`XLA_DOWNCAST_BF16=0` means "off" elsewhere, but the kernel's logarithms of sums in bfloat16 to NxD."""
    monkeypatch.setenv("XLA_DOWNCAST_BF16", "0")
    backend.choose_attention("plain", SHAPE)
    with pytest.raises(BackendError, match=r"XLA_DOWNCAST_BF16=0 makes .* unset it, or use backend\.attention=plain"):
        backend.choose_attention("auto", SHAPE)


def test_other_devices_have_one_attention() -> None:
    backend = CpuBackend()
    for wanted in ("auto", "plain"):
        backend.choose_attention(wanted, SHAPE)
    assert not any("attention" in note.split(",")[0] for note in backend.notes())
    with pytest.raises(ConfigError, match=r"flash is not a kernel of cpu, which has torch's"):
        backend.choose_attention("flash", SHAPE)


class _Telling(CpuBackend):
    asked: tuple[str, AttentionShape] | None = None

    def choose_attention(self, wanted: str, shape: AttentionShape) -> None:
        self.asked = (wanted, shape)

    def notes(self) -> tuple[str, ...]:
        return ("plain attention: as this test asks",)


def test_a_run_chooses_before_it_builds_and_prints_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"source": "tokens", "path": str(token_file(tmp_path / "rows.npy", 4)), "shuffle": False}
    backend = _Telling()
    train_on(RunContext.open(backend, run_plan(tmp_path / "run", data, steps=1, backend={"attention": "plain"})))
    assert backend.asked == ("plain", AttentionShape(1, 16, 8, 8, "fp32"))
    assert "plain attention: as this test asks\n" in capsys.readouterr().err


def test_the_shape_is_that_of_one_rank() -> None:
    resolved = plan("gqa2", parallel={"tp": 2}, train={"micro_batch": 3, "seq_len": 32}, precision={"params": "bf16"})
    result = AttentionShape.of(resolved.config, resolved.dimensions)
    assert result == AttentionShape(micro_batch=3, seq_len=32, num_heads=4, head_size=8, params="bf16")
