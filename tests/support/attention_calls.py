"""Attention of GPUs without a device: a recorder of the calls, backends that choose, and a flash kernel for CPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from nxtrain.backends import (
    cpu_kernels,
    cuda,
    flash_ranges,
    flex_attention,
    sdpa_kernels,
    torch_attention,
    torch_kernels,
)
from nxtrain.backends.attention_choice import AttentionShape
from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.cuda import CudaBackend, CudaKernels
from nxtrain.backends.flash_ranges import Call, FlashKernel, FlashRanges
from nxtrain.backends.neuron import backend as neuron
from nxtrain.backends.neuron import sdk
from nxtrain.backends.neuron.backend import NeuronBackend
from nxtrain.backends.neuron.hardware import INSTANCES
from nxtrain.backends.neuron.native import NeuronNativeBackend
from nxtrain.backends.neuron.native_kernels import NeuronNativeKernels
from nxtrain.backends.neuron.sdk import Package, SdkVersion
from nxtrain.backends.ranged_attention import Blocks
from nxtrain.backends.torch_attention import repeat_heads
from nxtrain.backends.torch_kernels import FusedKernels
from nxtrain.backends.xla.backend import XlaBackend, XlaKernels
from nxtrain.common.kernels import Kernels, KeyRanges
from nxtrain.common.mesh import Mesh
from nxtrain.common.sequence_cut import SequenceCut
from nxtrain.launch import neuron as launch_neuron
from nxtrain.nn.attention import CausalAttention
from nxtrain.parallel.context_parallel import ContextParallel
from tests.support.contract_functions import Echo
from tests.unit.backends.test_neuron_attention import MODULE, fake_nki_flash_attn_func

NXD = Package("neuronx-distributed", "0.17.26814")
PINS = ExitStack()
"""Kernels that GPUs of a test pin, until the test ends."""
SHORT = 6
"""Tokens of the small attention of a short sequence; a long one has twice as many."""


class Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            is_masked, is_grouped = kwargs.get("attn_mask") is not None, kwargs.get("enable_gqa", False)
            self.kinds.add("masked" if is_masked else "grouped" if is_grouped else "plain")
        return func(*args, **kwargs)


@contextmanager
def recorded_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Record the calls of attention, also of NxD's flash kernel, of blocks and of calls for each document."""
    recorder = Recorder()
    by_blocks = Blocks.attend

    def flash(*args: Any, **kwargs: Any) -> Tensor:
        recorder.kinds.add("flash")
        return fake_nki_flash_attn_func(*args, **kwargs)

    def by_document(*args: Any) -> Tensor:
        recorder.kinds.add("per-document")
        return torch_attention.attention_by_document(*args)

    def flex(q: Tensor, *_: Tensor) -> Tensor:
        recorder.kinds.add("flex")
        return q

    def blocked(*args: Any) -> tuple[Tensor, Tensor]:
        recorder.kinds.add("blocked")
        return by_blocks(*args)

    class Ranges(CpuFlash):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
            recorder.kinds.add("flash")
            return super().forward(q, k, v, call)

    monkeypatch.setattr(cuda, "TorchFlash", Ranges)
    monkeypatch.setattr(Blocks, "attend", blocked)
    monkeypatch.setattr(torch_kernels, "LONGEST_SCORES", SHORT)
    monkeypatch.setattr(flex_attention, "compiled", lambda: flex)
    for trials in (flash_ranges, flex_attention, sdpa_kernels):
        monkeypatch.setattr(trials, "failure", lambda *_: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    module = ModuleType(MODULE)
    module.nki_flash_attn_func = flash  # type: ignore[attr-defined]
    for name in ("neuronx_distributed", "neuronx_distributed.kernels"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(cpu_kernels, "attention_by_document", by_document)
    monkeypatch.setattr(XlaKernels, "__init__", lambda _: None)
    monkeypatch.setattr(XlaBackend, "__init__", lambda *_, **__: None)
    for place in (neuron, launch_neuron):
        monkeypatch.setattr(place, "this_machine", lambda: INSTANCES["trn2.48xlarge"])
    for place in (sdk, launch_neuron):
        monkeypatch.setattr(place, "detect", lambda: SdkVersion(2, 28))
        monkeypatch.setattr(place, "installed", lambda _: NXD)
    monkeypatch.delenv("TORCH_NEURONX_ENABLE_NKI_SDPA", raising=False)
    with recorder, PINS:
        yield recorder


def opened(name: str) -> Backend:
    """A backend with the kernels of its device, which claims none."""
    if name == "neuron":
        return NeuronBackend()
    kernels = {
        "cpu": CpuKernels,
        "cpu compiled": CpuKernels,
        "cuda": CudaKernels,
        "xla": XlaKernels,
        "neuron-native": NeuronNativeKernels,
    }
    kinds: dict[str, type[Any]] = {"cuda": CudaBackend, "xla": XlaBackend, "neuron-native": NeuronNativeBackend}
    backend: Backend = object.__new__(kinds.get(name, CpuBackend))
    backend.name, backend.kernels = name.split(maxsplit=1)[0], kernels[name]()
    backend.device = torch.device("cpu")
    if isinstance(backend, NeuronNativeBackend):
        backend._rounding = ""
    if isinstance(backend, CpuBackend):
        backend._transport_note = ""
    if isinstance(backend, CudaBackend):
        backend._pins = PINS
    return backend


def attend(kernels: Kernels, shape: AttentionShape) -> None:
    """A small attention of a long or a short sequence, with documents and context parallel ranks as in a shape."""
    length = 2 * SHORT if shape.is_long else SHORT
    q, kv = torch.randn(length, 2, 4, 8), torch.randn(length, 2, 2, 8)
    starts = torch.tensor([[0, 0, 2, 2, 2, 5, 5, 5, 5, 5, 5, 5], [0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4]])[:, :length]
    given = starts if shape.documents else None
    if shape.cp == 1:
        CausalAttention(kernels)(q, kv, kv, given)
        return
    cut = SequenceCut(length, 2, "striped")
    context = ContextParallel(Mesh.build(2, 0, cp=2).cp, cut, "gather", Echo(), kernels)
    own = context.positions
    given = None if given is None else given[:, own]
    CausalAttention(kernels, context)(q[own], kv[own], kv[own], given, own)


_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuFlash(FlashKernel):
    """torch's kernel for CPUs, whose backward pass takes any sums, as FlashAttention's does."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        if call.offsets is None:
            out, log_sums = _FORWARD(*_heads(q, k, v), 0.0, False, attn_mask=_mask(q, k, call))
            return out.transpose(1, 2), log_sums
        outs, sums = [], []
        for own, theirs in _tiles(call):
            tile = Call(slice(0, 0), slice(0, 0), call.mask, None, (0, 0))
            out, log_sums = self.forward(q[None, own], k[None, theirs], v[None, theirs], tile)
            outs.append(out[0])
            sums.append(log_sums[0])
        return torch.cat(outs), torch.cat(sums, dim=1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, call: Call
    ) -> tuple[Tensor, Tensor, Tensor]:
        if call.offsets is None:
            repeats = q.shape[2] // k.shape[2]
            given = (grad.transpose(1, 2), *_heads(q, k, v), out.transpose(1, 2), log_sums)
            grads = _BACKWARD(*(x.contiguous() for x in given), 0.0, False, attn_mask=_mask(q, k, call))
            q_grad, *rest = (x.transpose(1, 2) for x in grads)
            k_grad, v_grad = (x.unflatten(2, (-1, repeats)).sum(dim=3) for x in rest)
            return q_grad, k_grad, v_grad
        parts = []
        for own, theirs in _tiles(call):
            tile = Call(slice(0, 0), slice(0, 0), call.mask, None, (0, 0))
            rows = grad[None, own], q[None, own], k[None, theirs], v[None, theirs], out[None, own]
            parts.append(self.backward(*rows, log_sums[None, :, own], tile))
        q_grad, k_grad, v_grad = (torch.cat([x[0] for x in side]) for side in zip(*parts, strict=True))
        return q_grad, k_grad, v_grad


class FlashOnCpu(FusedKernels):
    """Kernels whose attention to ranges is that of GPUs, by the CPU's flash kernel."""

    def __init__(self) -> None:
        self.ranges = FlashRanges(CpuFlash(), WeakTensorKeyDictionary())

    def has_visible_keys(self, ranges: KeyRanges) -> bool:
        return bool(self.ranges.calls(ranges))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        return self.ranges.attend(q, k, v, ranges)

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranges: KeyRanges
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.ranges.attend_backward(grad, q, k, v, out, log_sums, ranges)


def _heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, N, H) and (B, T, M, H) to (B, N, T, H), a K/V head for each query head."""
    repeats = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return q, repeat_heads(k, repeats), repeat_heads(v, repeats)


def _tiles(call: Call) -> list[tuple[slice, slice]]:
    """Queries and keys of each tile."""
    assert call.offsets is not None
    queries, keys = ([slice(*pair) for pair in pairwise(side.tolist())] for side in call.offsets)
    assert max(rows.stop - rows.start for rows in queries) == call.longest[0]
    assert max(rows.stop - rows.start for rows in keys) == call.longest[1]
    return list(zip(queries, keys, strict=True))


def _mask(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """(Q, K) additive mask; the diagonal ends in the last query and the last key."""
    diagonal = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    keys = torch.arange(k.shape[1])
    hidden = torch.zeros(q.shape[1], k.shape[1], dtype=torch.bool)
    if call.mask.causal:
        hidden |= keys > diagonal
    if call.mask.window is not None:
        hidden |= keys < diagonal - call.mask.window
    assert not hidden.all(dim=1).any(), "no query of a tile is without a key"
    return torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, float("-inf"))
