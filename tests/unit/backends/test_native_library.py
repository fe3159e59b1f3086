"""Kernels of the NKI Library on TorchNeuron: their choice, their registration as operations, and their trial.

The kernels are stand-ins with the signatures, layouts and conditions of the true ones (`tests/support/nki_bounded.py`
and `nki_ring.py`); operations are registered by torch, whose schemas the stand-in for `nki_op` has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from nxtrain.backends.attention_choice import AttentionShape
from nxtrain.backends.base import Backend
from nxtrain.backends.neuron import native, native_library
from nxtrain.backends.neuron.bounded import BoundedKernels
from nxtrain.backends.neuron.native import NeuronNativeBackend
from nxtrain.backends.neuron.native_attention import choose_native, library_lacking
from nxtrain.backends.neuron.native_kernels import NeuronNativeKernels
from nxtrain.backends.neuron.ring_kernels import RingKernels
from nxtrain.backends.torch_kernels import PlainKernels
from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.common.mesh import Mesh
from nxtrain.train.build import context_parallel_of
from tests.support import nki_bounded, nki_ring
from tests.support.models import plan

SHAPE = AttentionShape(2, 4096, 8, 128, "bf16", documents=True)
IN_RING = replace(SHAPE, documents=False, cp=4)


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library and TorchNeuron, as far as kernels need them."""
    package: Any = ModuleType("torch_neuronx")
    package.nki_op, package.wrap_nki = nki_bounded.nki_op, lambda kernel: kernel
    for name, module in {"torch_neuronx": package, **nki_bounded.modules(), **nki_ring.modules()}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(native, "library_lacking", lambda: "")
    monkeypatch.setattr(native, "this_machine", lambda: SimpleNamespace(physical_cores=2))
    yield
    native_library.load_bounded.cache_clear()
    native_library.load_ring.cache_clear()


@pytest.fixture
def backend() -> NeuronNativeBackend:
    """One that claims no device."""
    result = object.__new__(NeuronNativeBackend)
    result.extracts, result.device = False, torch.device("cpu")
    result.kernels = NeuronNativeKernels()
    result._rounding = ""
    return result


def chosen(shape: AttentionShape, wanted: str = "auto", library: str = "") -> Any:
    return choose_native(wanted, shape, switched_off=False, library=library, lnc=2)


def test_documents_windows_and_rings_take_the_library() -> None:
    for wanted in ("auto", "flash"):
        assert (chosen(SHAPE, wanted).kind, chosen(SHAPE, wanted).lnc) == ("bounded", 2)
        assert chosen(IN_RING, wanted).kind == "ring"
    assert "by the NKI Library's kernels with bounds of keys per query, tried when a run starts" in str(chosen(SHAPE))
    assert chosen(SHAPE, "plain").kind == chosen(IN_RING, "plain").kind == "blocked"
    windows = replace(SHAPE, documents=False, window=512, full_layers=3)
    assert chosen(windows).kind == "bounded"
    assert "The first 3 layers have no window: flash attention" in chosen(windows).reason
    assert "The first 3 layers have no window: ring attention" in chosen(replace(windows, cp=2)).reason


@pytest.mark.parametrize(
    ("shape", "library", "obstacle"),
    [
        (SHAPE, "the package nkilib is not installed", "cannot be had: the package nkilib is not installed"),
        (replace(SHAPE, seq_len=4352), "", "train.seq_len=4352 is not a multiple of 512"),
        (replace(SHAPE, micro_batch=65), "", "520 query heads per rank, and they take 512 at most"),
        (replace(SHAPE, params="fp32"), "", "they multiply in bf16"),
        (replace(IN_RING, cp_method="gather"), "", "parallel.cp_method=gather"),
        (replace(IN_RING, cp_layout="zigzag"), "", "parallel.cp_layout=zigzag, and they take contiguous and striped"),
        (replace(IN_RING, documents=True), "", "data.doc_mask=true, and they take documents only if"),
        (replace(IN_RING, window=100), "", "a layer's window, and they take none"),
        (replace(IN_RING, cp=64, seq_len=64 * 512), "", "parallel.cp=64, and they take 32 ranks at most"),
        (replace(IN_RING, seq_len=4 * 513), "", "513 tokens per rank are not a multiple of 512 up to 16,384"),
        (replace(IN_RING, head_size=160), "", "heads are 160 wide, and they take 128 at most"),
    ],
)
def test_each_obstacle_is_named(shape: AttentionShape, library: str, obstacle: str) -> None:
    found = chosen(shape, library=library)
    assert found.kind == "blocked"
    assert obstacle in found.reason
    with pytest.raises(ConfigError, match="flash cannot be had"):
        chosen(shape, "flash", library)


def test_a_library_that_is_absent_is_named() -> None:
    assert library_lacking() == "the package nki is not installed"


def test_a_run_tries_the_kernels_and_takes_them(backend: NeuronNativeBackend) -> None:
    shape = replace(SHAPE, head_size=16)
    backend.choose_attention("auto", shape)
    assert backend.attention is not None
    assert backend.attention.kind == "bounded"
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(512, 2, heads, 16, generator=generator) for heads in (4, 2, 2))
    starts = torch.arange(512).div(70, rounding_mode="floor").mul(70).expand(2, -1)
    taken = backend.kernels.document_attention(q, k, v, starts)
    torch.testing.assert_close(taken, PlainKernels().document_attention(q, k, v, starts), rtol=1e-5, atol=1e-5)
    assert {"attention_cte", "attention_bwd"} <= {name.rpartition("::")[2] for name in operations()}
    backend.choose_attention("plain", shape)
    assert backend.kernels.bounded is None


def operations() -> list[str]:
    """Operations of torch that nxtrain has registered."""
    return [name.split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("nxtrain::")]


def test_kernels_with_wrong_numbers_are_left_out(backend: NeuronNativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = BoundedKernels.attend

    def wrong(self: BoundedKernels, *given: Any) -> tuple[Tensor, Tensor]:
        out, log_sums = sound(self, *given)
        return 2 * out, log_sums

    monkeypatch.setattr(BoundedKernels, "attend", wrong)
    shape = replace(SHAPE, head_size=16)
    backend.choose_attention("auto", shape)
    assert backend.kernels.bounded is None
    assert "blocked attention: " in str(backend.attention)
    assert "cannot be had: its numbers are off by" in str(backend.attention)
    with pytest.raises(BackendError, match=r"flash cannot run on this device: its numbers are off by .*; use auto"):
        backend.choose_attention("flash", shape)


def test_a_ring_has_stripes_unless_pieces_are_asked_for(backend: NeuronNativeBackend) -> None:
    backend._mesh = Mesh.build(4, 1, cp=4)
    for layout, wanted in (("auto", "striped"), ("contiguous", "contiguous")):
        resolved = plan("gqa2", parallel={"cp": 4, "cp_layout": layout}, train={"seq_len": 2048})
        backend.choose_attention("auto", replace(IN_RING, cp_layout=layout))  # type: ignore[arg-type]
        assert isinstance(backend.ring, RingKernels)
        given: Any = SimpleNamespace(name=backend.name, ring=backend.ring, collectives=None, kernels=backend.kernels)
        context = context_parallel_of(resolved, given, backend._mesh)
        assert context is not None
        assert (context.cut.layout, context.ring, context.method) == (wanted, backend.ring, "gather")
    without: Backend = SimpleNamespace(name="cpu", ring=None, collectives=None, kernels=None)  # type: ignore[assignment]
    context = context_parallel_of(plan("gqa2", parallel={"cp": 4}, train={"seq_len": 2048}), without, backend._mesh)
    assert context is not None
    assert context.cut.layout == "zigzag"


def test_windows_beside_full_layers_gather_and_the_full_layers_ring(backend: NeuronNativeBackend) -> None:
    backend._mesh = Mesh.build(2, 0, cp=2)
    backend.choose_attention("auto", replace(IN_RING, cp=2, window=100, full_layers=2))
    assert backend.ring is not None
    assert backend.attention is not None
    assert backend.attention.kind == "blocked"


def test_kernels_that_cannot_be_imported_leave_blocks_with_the_reason(
    backend: NeuronNativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend._mesh = Mesh.build(4, 0, cp=4)
    for name in ("core.attention.attention_cte", "experimental.attention.ring_attention_fwd"):
        monkeypatch.setitem(sys.modules, f"nkilib.{name}", None)
    for shape in (SHAPE, IN_RING):
        backend.choose_attention("auto", shape)
        assert backend.kernels.bounded is None
        assert backend.ring is None
        said = str(backend.attention)
        assert said.startswith("blocked attention: ")
        assert "cannot be had: ModuleNotFoundError: import of nkilib." in said
        with pytest.raises(BackendError, match=r"flash cannot run on this device: ModuleNotFoundError: .*; use auto"):
            backend.choose_attention("flash", shape)


def test_a_torchneuron_without_operations_of_kernels_leaves_blocks(
    backend: NeuronNativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["torch_neuronx"], "nki_op")
    backend.choose_attention("auto", SHAPE)
    assert "cannot be had: ImportError: cannot import name 'nki_op'" in str(backend.attention)


@pytest.mark.filterwarnings("ignore")  # Dynamo looks at what torch warns of
def test_a_graph_has_the_kernels_as_operations(backend: NeuronNativeBackend) -> None:
    torch._dynamo.reset()
    backend.choose_attention("auto", replace(SHAPE, head_size=16))
    generator = torch.Generator().manual_seed(0)
    names: list[str] = []
    given = [torch.randn(512, 2, heads, 16, generator=generator).requires_grad_() for heads in (4, 1, 1)]
    starts = torch.arange(512).div(70, rounding_mode="floor").mul(70).expand(2, -1)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return backend.kernels.document_attention(q, k, v, starts, 100)

    def kept(graph: torch.fx.GraphModule, _: object) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    compiled = torch.compile(attention, backend=aot_autograd(fw_compiler=kept), fullgraph=True, dynamic=False)
    nki_bounded.attention_cte.cores.clear()
    results = []
    for attend in (compiled, attention):
        out = attend(*given)
        results.append([out, *torch.autograd.grad(out, given, out.detach())])
    for of_graph, eager in zip(*results, strict=True):
        torch.testing.assert_close(of_graph, eager, rtol=1e-5, atol=1e-5)
    assert [name for name in names if name.startswith("nxtrain")] == [
        "nxtrain.attention_cte.default",
        "nxtrain.attention_bwd.default",
    ]
    assert set(nki_bounded.attention_cte.cores) == {2}, "later kernels share positions where a head is alone"
