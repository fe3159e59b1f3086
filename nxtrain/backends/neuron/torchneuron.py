"""Check for TorchNeuron: Trainium2 and 3 as PyTorch's device "neuron". Importable without torch.

TorchNeuron's package has the same name as the one for PyTorch/XLA, torch-neuronx: an environment has at most one.

Source: release-notes/components/torchneuron.html, setup/pytorch/update-manual.html and torch/about-pytorch-neuron.html
in https://awsdocs-neuron.readthedocs-hosted.com/en/latest, of Neuron SDK 2.33 (2026-10-19).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from nxtrain.backends.base import Support
from nxtrain.backends.neuron.hardware import FIRST_GENERATION, this_machine
from nxtrain.backends.neuron.sdk import (
    PACKAGE_INDEX,
    SdkVersion,
    installed,
    is_torchneuron,
    misfits_of_torch,
    missing_devices,
    num_devices,
    placeholder,
)

SDK = SdkVersion(2, 33)
"""First release of the Neuron SDK with TorchNeuron as a public beta."""

TORCH = ("2.13", "2.14")
"""Releases of torch that TorchNeuron supports."""

PYTHON = (3, 12)
"""Oldest Python with packages of TorchNeuron."""

ELSEWHERE = "use backend.name=neuron, which runs on Trn1 and Trn2 through PyTorch/XLA"
"""Advice for machines without TorchNeuron."""


def support() -> Support:
    """Check if this machine can train through TorchNeuron; if not, one line for each missing part."""
    instance = this_machine()
    if instance is not None and instance.target in FIRST_GENERATION:
        reason = f"{instance.name} has chips of the first generation: TorchNeuron is for Trn2 and Trn3 only"
        return Support(False, f"{reason}\n    {ELSEWHERE}")
    lacking = [*_wrong_packages(), *missing_devices()]
    if lacking:
        return Support(False, "\n    ".join([*lacking, install_command(), f"or {ELSEWHERE}"]))
    package = installed("torch-neuronx")
    assert package is not None
    return Support(True, f"{num_devices()} Neuron devices, TorchNeuron {package.version}")


def detect() -> SdkVersion | None:
    """Release of the SDK of an installed TorchNeuron; None if TorchNeuron is not installed."""
    package = installed("torch-neuronx")
    return SDK if package and not package.placeholder and is_torchneuron(package.version) else None


def install_command() -> str:
    """Text with the command that installs TorchNeuron."""
    indices = f"--extra-index-url {PACKAGE_INDEX} --extra-index-url https://download.pytorch.org/whl/cpu"
    where = f"on a Trn2 or Trn3 instance with Python {PYTHON[0]}.{PYTHON[1]}"
    pins = f"'torch=={TORCH[-1]}.*' 'torch-neuronx=={TORCH[-1]}.3.0.*' 'neuronx-cc==2.*' nki"
    return f"install TorchNeuron, a public beta in Neuron SDK {SDK}, {where}: pip install {indices} {pins}"


def _wrong_packages() -> Iterator[str]:
    package = installed("torch-neuronx")
    if package is None:
        yield "TorchNeuron is not installed"
    elif package.placeholder:
        yield placeholder(package)
    elif not is_torchneuron(package.version):
        yield f"torch-neuronx {package.version} is the one for PyTorch/XLA, not TorchNeuron"
    else:
        yield from misfits_of_torch(package.version)
    torch = installed("torch")
    if torch is not None and tuple(map(int, torch.version.split(".")[:2])) < tuple(map(int, TORCH[0].split("."))):
        yield f"torch {torch.version} is too old: TorchNeuron is made for torch {' and '.join(TORCH)}"
    if sys.version_info < PYTHON:
        found, needed = (".".join(map(str, version[:2])) for version in (sys.version_info, PYTHON))
        yield f"Python {found} is too old: TorchNeuron has packages for {needed} and newer"
