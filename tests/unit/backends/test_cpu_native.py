"""Kernels in C++: accuracy beside torch's, equal bits for any number of threads, defects that are seen, and builds."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from nxtrain.backends.cpu import CpuBackend
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.cpu_native import build
from nxtrain.backends.cpu_native import kernels as native_kernels
from nxtrain.backends.cpu_native.kernels import NativeKernels
from nxtrain.backends.cpu_products import has_bf16_products
from nxtrain.backends.torch_attention import sdpa
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.common.errors import BackendError
from nxtrain.common.mesh import Mesh
from nxtrain.common.vocab import VocabColumns
from tests.support import contract_functions, contract_kernels
from tests.support.contract import Setting, hold
from tests.support.contract_functions import Echo, Ranks
from tests.support.contract_kernels import exact_attention
from tests.support.cpp_mutants import mutant_libraries

needs_products = pytest.mark.skipif(not has_bf16_products(), reason=contract_functions.NEEDS_PRODUCTS)
EPS = 1e-5


@pytest.fixture
def kernels() -> NativeKernels:
    return NativeKernels(build.load())


@pytest.fixture
def forget() -> Iterator[None]:
    """Load the library anew in the test, and again after it."""
    build.load.cache_clear()
    yield
    build.load.cache_clear()


def drawn_attention(rng: Random) -> list[Tensor]:
    """Queries, keys, values and the gradient of the output, in bf16."""
    length, batch, width = rng.choice((1, 63, 64, 65, 130, 200)), rng.choice((1, 2)), rng.choice((2, 16, 64, 80))
    kv_heads, repeats = rng.choice((1, 3)), rng.choice((1, 2))
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    heads = (kv_heads * repeats, kv_heads, kv_heads, kv_heads * repeats)
    return [torch.randn(length, batch, n, width, generator=generator).bfloat16() * 2 for n in heads]


def with_grads(function: object, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = function(*inputs)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@needs_products
def test_attention_is_at_least_as_accurate_as_torchs_flash_kernel(kernels: NativeKernels) -> None:
    rng = Random(0)
    errors: dict[str, list[float]] = {"ours": [0.0] * 4, "torch": [0.0] * 4}
    for _ in range(12):
        given = drawn_attention(rng)
        exact = with_grads(exact_attention, *(x.double() for x in given))
        for name, function in (("ours", kernels.attention), ("torch", sdpa)):
            for i, (found, wanted) in enumerate(zip(with_grads(function, *given), exact, strict=True)):
                errors[name][i] += ((found.double() - wanted).norm() / (wanted.norm() + 1e-9)).item()
    for ours, theirs in zip(errors["ours"], errors["torch"], strict=True):
        assert ours <= 1.02 * theirs, errors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(kernels: NativeKernels, dtype: torch.dtype) -> None:
    def results() -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        x, weight, grad = (torch.randn(*s, generator=generator).to(dtype) for s in ((130, 40), (40,), (130, 40)))
        x.requires_grad_()
        weight.requires_grad_()
        normed = kernels.rms_norm(x, weight, EPS)
        gated = kernels.swiglu(x)
        logits = torch.randn(70, 33, generator=generator).to(dtype)
        columns = VocabColumns(torch.tensor([0, 33]), None, C10dCollectives(1), Mesh(1, 0).tp)
        loss, logits_grad = kernels.cross_entropy(logits, torch.arange(70) % 33, columns, needs_grad=True)
        assert logits_grad is not None
        found = [normed, *torch.autograd.grad(normed, (x, weight), grad), gated, loss, logits_grad]
        if dtype == torch.bfloat16:
            found += with_grads(kernels.attention, *drawn_attention(Random(3)))
        return found

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = results()
        torch.set_num_threads(3)
        assert all(torch.equal(a, b) for a, b in zip(alone, results(), strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_number_that_is_not_finite_stays_visible(kernels: NativeKernels, dtype: torch.dtype, bad: float) -> None:
    x = torch.ones(3, 8, dtype=dtype)
    x[1, 2] = bad
    assert not kernels.rms_norm(x, torch.ones(8, dtype=dtype), EPS)[1].isfinite().all()
    assert not kernels.swiglu(x)[1].isfinite().all()
    assert not kernels.row_square_sums(x)[1].isfinite()
    columns = VocabColumns(torch.tensor([0, 8]), None, C10dCollectives(1), Mesh(1, 0).tp)
    loss, _ = kernels.cross_entropy(x.clone(), torch.tensor([0, 1, 2]), columns, needs_grad=True)
    assert not loss.isfinite()
    q = torch.ones(5, 1, 1, 8, dtype=dtype)
    q[3, 0, 0, 0] = bad
    out = kernels.attention(q, q.clone(), q.clone())
    assert not out[3:].isfinite().any()


@pytest.mark.parametrize("value", [-200.0, -88.0, -87.5, 0.0, 60.0, 87.9, 200.0])
def test_the_gate_is_right_for_large_numbers(kernels: NativeKernels, value: float) -> None:
    x = torch.tensor([[value, 1.0]], requires_grad=True)
    exact = x.detach().double().requires_grad_()
    out, wanted = kernels.swiglu(x), torch.nn.functional.silu(exact[:, :1]) * exact[:, 1:]
    torch.testing.assert_close(out.double(), wanted, rtol=1e-6, atol=1e-30)
    (grad,), (wanted_grad,) = torch.autograd.grad(out.sum(), x), torch.autograd.grad(wanted.sum(), exact)
    torch.testing.assert_close(grad.double(), wanted_grad, rtol=1e-6, atol=1e-30)


MUTANTS = {
    "attention sees the next token": ("seen = first + r + 1,", "seen = std::min(first + r + 2, (i + 1) * BLOCK),"),
    "attention forgets its scale": ("exp_(score[r] * scale - log_sums[r])", "exp_(score[r] - log_sums[r])"),
    "attention drops the last queries": ("for (long i = j; i < blocks; i++)", "for (long i = j; i < j + 1; i++)"),
    "a head's gradients overwrite another's": (
        "w.k_grad.data() + j * size, width, true",
        "w.k_grad.data() + j * size, width, false",
    ),
    "the norm's weight gradient misses rows": (
        "long parts = (rows + ROWS - 1) / ROWS;",
        "long parts = std::max(1L, rows / ROWS);",
    ),
    "the norm adds no eps": ("sum / float(size) + eps", "sum / float(size)"),
    "the gate's derivative is the sigmoid": ("* s * (1.0f + g * (1.0f - s))", "* s"),
    "backward rotates forward": ("turn = sign * d[i]", "turn = d[i]"),
    "the loss counts padded columns": (
        "for (long i = 0; i < used; i++) sum +=",
        "for (long i = 0; i < columns; i++) sum +=",
    ),
    "the target keeps its probability": ("(at_target - 1.0f) * factor", "at_target * factor"),
    "bfloat16 is cut off": ("bits + 0x7fff + ((bits >> 16) & 1)", "bits"),
    "squares of the first part alone": ("std::min(size, first + PART)", "std::min(size, first + 500)"),
}
"""Defects in `kernels.cpp`: text and its replacement."""


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ctypes.CDLL]:
    """Libraries with one defect each, compiled without optimization."""
    flags = tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS)
    libraries = mutant_libraries(build.SOURCES[0], MUTANTS, flags, tmp_path_factory.mktemp("mutants"))
    return {name: ctypes.CDLL(library) for name, library in libraries.items()}


def seen_defect(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True if the contract's draws, or the accuracy of rounding, show a difference."""
    kernels = NativeKernels(library)
    monkeypatch.setattr(native_kernels, "load", lambda: library)
    alone = Ranks(Echo(), Mesh.build(1, 0).tp)
    functions = [f for f in contract_functions.CASES if f.__name__.startswith("_Native")]
    if not has_bf16_products():
        functions.remove(native_kernels._NativeAttention)
    cases = [contract_functions.CASES[function] for function in functions]
    names = ("cross_entropy", "row_square_sums", "attention")
    rng = Random(0)
    try:
        for _ in range(25):
            for dtype in (torch.float32, torch.bfloat16):
                for case in cases:
                    hold(case(alone, rng), Setting(rng, dtype))
                for name in names:
                    hold(contract_kernels.CASES[name](kernels, rng), Setting(rng, dtype))
        x = torch.linspace(0.1, 3.0, 64)
        ones, wanted = (
            torch.ones(64).bfloat16(),
            CpuKernels().rms_norm(x.bfloat16()[None], torch.ones(64).bfloat16(), EPS),
        )
        torch.testing.assert_close(kernels.rms_norm(x.bfloat16()[None], ones, EPS), wanted, rtol=0, atol=0)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[needs_products] if "attention" in name or "head" in name else []) for name in MUTANTS],
)
def test_a_defect_is_seen(name: str, mutants: dict[str, ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen_defect(mutants[name], monkeypatch)


def test_without_a_compiler_the_kernels_are_torchs(forget: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    backend = CpuBackend()
    assert backend.notes() == ("CPU kernels: torch's, no C++ compiler is on PATH; Debian and Ubuntu: apt install g++",)
    assert type(backend.kernels) is CpuKernels
    with pytest.raises(BackendError, match=r"backend\.cpu_kernels=native cannot run here: no C\+\+ compiler .* auto"):
        backend.choose_kernels("native")


def test_a_compiler_that_fails_is_quoted(forget: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int f() { return unknown; }\n")
    monkeypatch.setattr(build, "SOURCES", (source,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(build.KernelBuildError, match=r"failed: .*broken\.cpp:1.*unknown"):
        build.load()
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_folder_that_cannot_be_written_is_named(
    forget: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(build.KernelBuildError, match="file"):
        build.load()


def test_torchs_kernels_are_a_choice() -> None:
    backend = CpuBackend()
    backend.choose_kernels("torch")
    assert type(backend.kernels) is CpuKernels
    assert backend.notes() == ("CPU kernels: torch's, as backend.cpu_kernels=torch asks",)
    backend.choose_kernels("native")
    assert type(backend.kernels) is NativeKernels
