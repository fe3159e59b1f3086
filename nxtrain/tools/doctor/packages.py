"""Checks of installed packages: placeholders of AWS packages, torch, the Neuron SDK and NeuronX Distributed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from nxtrain.backends.neuron import sdk, torchneuron
from nxtrain.common.machines import GPU, NEURON, Machine
from nxtrain.tools.doctor.finding import Finding, fault, passed

AWS_PACKAGES = (
    *("torch-neuronx", "neuronx-cc", "libneuronxla", "neuronx-distributed", "neuronx-distributed-training"),
    *("nki", "neuron-cc", "torch-neuron"),
)
"""AWS packages whose names on PyPI may lead to empty placeholder packages."""

NEWEST_TORCH = (2, 15)
"""Newest release of torch that the tests ran with; continuous integration uses the same release."""


def check_packages(machine: Machine | None) -> Iterator[Finding]:
    """Check the packages of this Python environment; without a known machine, no vendor package is required."""
    yield _placeholders()
    yield _torch(machine)
    if machine is not None and machine.resource == NEURON:
        yield _neuron()
    package = sdk.installed("neuronx-distributed")
    if package is None or package.placeholder:
        return
    support = sdk.distributed_support()
    if support.ok:
        yield passed("nxd", support.reason)
    else:
        what, _, fix = support.reason.partition("; ")
        why = "its layers are not used, or give wrong gradients silently"
        yield fault("nxd", what, why, fix or sdk.install_command())


def _placeholders() -> Finding:
    packages = [sdk.installed(name) for name in AWS_PACKAGES]
    placeholders = [package for package in packages if package is not None and package.placeholder]
    if not placeholders:
        return passed("packages", f"no placeholder of an AWS package; Python {sys.version.partition(' ')[0]}")
    what = "; ".join(sdk.placeholder(package) for package in placeholders)
    names = " ".join(package.name for package in placeholders)
    fix = f"pip uninstall -y {names}; then {sdk.install_command()}"
    return fault("packages", what, "an import of the package fails, or finds nothing", fix)


def _torch(machine: Machine | None) -> Finding:
    torch, xla = sdk.installed("torch"), sdk.installed("torch-xla")
    if torch is None:
        return fault("torch", "torch is not installed", "no rank can start", "pip install nxtrain")
    versions = f"torch {torch.version}"
    if xla is not None:
        versions += f", torch-xla {xla.version}"
    if machine is not None and machine.resource == GPU and torch.version.endswith("+cpu"):
        why = "this build of torch knows no GPU, and ranks would train on processors"
        return fault("torch", versions, why, "pip install --force-reinstall torch, from PyPI")
    if xla is not None and xla.version.split(".")[:2] != torch.version.split(".")[:2]:
        fix = f"pip install torch-xla=={'.'.join(torch.version.split('.')[:2])}.*, or the torch of torch-xla"
        return fault("torch", versions, "torch-xla is built for one release of torch, and fails at import", fix)
    release = re.match(r"(\d+)\.(\d+)", torch.version)
    if release is not None and tuple(map(int, release.groups())) > NEWEST_TORCH:
        tested = ".".join(map(str, NEWEST_TORCH))
        return passed("torch", f"{versions}, newer than {tested}, the newest release that nxtrain is tested with")
    return passed("torch", versions)


def _neuron() -> Finding:
    """Check that the packages of PyTorch/XLA or of TorchNeuron are complete, which are the two ways to use Trainium."""
    support = torchneuron.support() if torchneuron.detect() else sdk.support()
    if support.ok:
        return passed("sdk", support.reason)
    first, *rest = support.reason.splitlines()
    install = sdk.install_command()
    if rest:
        install = rest[-1].strip()
    what = "; ".join(line.strip() for line in (first, *rest[:-1]))
    return fault("sdk", what, "ranks cannot use the Neuron devices", install)
