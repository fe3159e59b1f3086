"""Every operation leaves its inputs as they are, in whatever form of memory they come.

Operations are found, not listed: a new one without a case fails. `tests/dist/test_input_contract.py` holds those that
communicate to the same on a process group, and `tests/xla/test_input_contract.py` those of XLA's devices.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from random import Random
from types import ModuleType

import pytest
import torch

import nxtrain
import nxtrain_models
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.cuda import CudaKernels
from nxtrain.backends.neuron.native_kernels import NeuronNativeKernels
from nxtrain.backends.torch_kernels import FusedKernels, PlainKernels
from nxtrain.common.kernels import Kernels
from nxtrain.common.layers import LayerSet
from nxtrain.common.mesh import Mesh
from nxtrain.parallel.native import NativeLayers
from tests.support import contract, contract_functions, contract_kernels, contract_layers
from tests.support.contract import Setting, Update, Work, check_gradient, hold
from tests.support.contract_functions import NOT_ECHOED, Echo, Ranks

SEED = 0
DRAWS = 40
DTYPES = (torch.float32, torch.bfloat16)
KERNELS = (FusedKernels(), PlainKernels(), CpuKernels(), CudaKernels(), NeuronNativeKernels())

ELSEWHERE = {
    "nxtrain.backends.xla.backend:XlaKernels": "tests/xla/test_input_contract.py",
    "nxtrain.backends.neuron.backend:NeuronKernels": "tests/xla/test_input_contract.py",
    "nxtrain.backends.neuron.nxd.layers:NxdLayers": "tests/dist/test_input_contract.py, marked nxd",
    "nxtrain.tools.trace.fake_rank:_Kernels": "tests/unit/tools/trace/test_fake_rank.py: tensors have no values",
}
"""Classes that need a vendor's package or compute no values, and the tests that hold them to the contract."""

VENDORS = {
    "nxtrain.backends.neuron.nxd.groups": "neuronx_distributed",
    "nxtrain.backends.neuron.nxd.layers": "neuronx_distributed",
}
"""Modules that import a vendor's package at once."""


def modules() -> Iterator[ModuleType]:
    """Every module of the library that imports here."""
    for package in (nxtrain, nxtrain_models):
        for result in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if result.name.endswith("__main__"):
                continue
            try:
                yield importlib.import_module(result.name)
            except ImportError as error:
                assert result.name in VENDORS and VENDORS[result.name] in str(error), error


def subclasses(base: type) -> dict[str, type]:
    """Classes of the library that derive from another, by module and name; abstract ones are none."""
    results: dict[str, type] = {}
    for module in modules():
        for value in vars(module).values():
            is_own = isinstance(value, type) and value.__module__ == module.__name__
            if is_own and issubclass(value, base) and not inspect.isabstract(value):
                results[name_of(value)] = value
    return results


def name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def alone() -> Ranks:
    return Ranks(Echo(), Mesh.build(1, 0).tp)


def pair(rank: int) -> Ranks:
    return Ranks(Echo(), Mesh.build(2, rank, tp=2).tp)


def test_every_autograd_function_has_a_case() -> None:
    result = set(subclasses(torch.autograd.Function).values())
    assert result == set(contract_functions.CASES), "write a case in tests/support/contract_functions.py"


def test_every_kernel_has_a_case() -> None:
    operations = {name for name in vars(Kernels) if inspect.isfunction(getattr(Kernels, name))}
    cases = set(contract_kernels.CASES) | contract_kernels.TAKE_NO_TENSORS
    assert operations == cases, "write a case in tests/support/contract_kernels.py"
    own = {name_of(type(kernels)) for kernels in KERNELS}
    assert set(subclasses(Kernels)) == own | {name for name in ELSEWHERE if name.endswith("Kernels")}, (
        "give it to a test of the contract"
    )


def test_every_layer_has_a_case() -> None:
    assert LayerSet.__abstractmethods__ == set(contract_layers.CASES), (
        "write a case in tests/support/contract_layers.py"
    )
    result = set(subclasses(LayerSet)) | {name for name in ELSEWHERE if name.endswith("Layers")}
    assert result == {name_of(NativeLayers), "nxtrain.backends.neuron.nxd.layers:NxdLayers"}


@pytest.mark.parametrize("name", contract_kernels.CASES)
@pytest.mark.parametrize("kernels", (*KERNELS, contract.WideKernels()), ids=lambda k: type(k).__name__)
def test_a_kernel_keeps_what_it_is_given(kernels: Kernels, name: str) -> None:
    drawn(lambda rng, _: contract_kernels.CASES[name](kernels, rng), name)


@pytest.mark.parametrize("function", contract_functions.CASES, ids=lambda f: f.__name__)
def test_an_autograd_function_keeps_what_it_is_given(function: type) -> None:
    places = [alone()] if function in NOT_ECHOED else [alone(), pair(0), pair(1)]
    drawn(lambda rng, _: contract_functions.CASES[function](rng.choice(places), rng), function.__name__)


@pytest.mark.parametrize("function", contract_functions.CASES, ids=lambda f: f.__name__)
def test_an_autograd_function_in_float64_has_the_gradient_of_its_differences(function: type) -> None:
    rng = Random(f"{SEED} {function.__name__}")
    for _ in range(4):
        work = contract_functions.CASES[function](alone(), rng)
        if work.in_float64:
            check_gradient(work, rng)
            hold(work, Setting(rng, torch.float64))


@pytest.mark.parametrize("name", contract_layers.CASES)
def test_a_layer_keeps_what_it_is_given(name: str) -> None:
    places = [alone()] if name in {"head", "embedding"} else [alone(), pair(0), pair(1)]

    def draw(rng: Random, dtype: torch.dtype) -> Work:
        case = rng.choice(contract_layers.CASES[name])
        return case(contract_layers.native, rng.choice(places), rng, dtype, lambda host: host)

    drawn(draw, name)


def drawn(draw: Callable[[Random, torch.dtype], Work | Update], name: str) -> None:
    """Hold drawn calls to the contract."""
    rng = Random(f"{SEED} {name}")
    for _ in range(DRAWS):
        dtype = rng.choice(DTYPES)
        hold(draw(rng, dtype), Setting(rng, dtype))
