"""Detection of the installed AWS Neuron SDK and of missing packages; importable without torch.

PyPI has placeholders under the names of AWS's packages. They install without an error and fail at import. Their package
description identifies them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from nxtrain.backends.base import Support

PACKAGE_INDEX = "https://pip.repos.neuron.amazonaws.com"
"""AWS's pip package index for the Neuron SDK (setup/pytorch/manual.rst in https://github.com/aws-neuron/aws-neuron-sdk)."""

DEVICES = Path("/dev")
"""Folder in which the Neuron driver makes one file `neuron<n>` per chip."""

_PLACEHOLDER = "WRONG PACKAGE"  # description of torch-neuronx 1.0 and the like, https://pypi.org/project/torch-neuronx


class SdkVersion(NamedTuple):
    """Version of a Neuron SDK release."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True)
class Release:
    """Prefixes of package versions in one release of the Neuron SDK.

    Args:
        python: Oldest and newest Python versions with packages.
        torch_neuronx: Version of torch-neuronx, without the leading version of torch.
        neuronx_cc: Version of the compiler.
        neuronx_distributed: Version of NeuronX Distributed.
    """

    python: tuple[str, str]
    torch_neuronx: str
    neuronx_cc: str
    neuronx_distributed: str


RELEASES = {
    SdkVersion(2, 27): Release(("3.10", "3.12"), "2.11", "2.22", "0.16"),
    SdkVersion(2, 28): Release(("3.10", "3.12"), "2.12", "2.23", "0.17"),
    SdkVersion(2, 29): Release(("3.10", "3.12"), "2.13", "2.24", "0.18"),
    SdkVersion(2, 30): Release(("3.11", "3.13"), "2.14", "2.25", "0.19"),
    SdkVersion(2, 31): Release(("3.11", "3.13"), "2.15", "2.26", "0.19"),
}
"""Package versions of the Neuron SDK releases with a torch-neuronx for torch 2.9; 2.32 has no such torch-neuronx.

Source: src/helperscripts/n2-manifest.json in https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a.
"""

DISTRIBUTED = ((0, 15), (0, 18))
"""First and last release of NeuronX Distributed that nxtrain is verified with; later releases are closed source."""

RECOMMENDED = SdkVersion(2, 28)
"""Neuron SDK release that AWS recommends for NxD and NxD Training.

For torch-neuronx alone AWS recommends 2.31.0.

Source: about-neuron/announcements/neuron2.x/announce-eos-nxdt-nxd-core-training.rst, and setup/pytorch/index.rst, in
the same repository.
"""


@dataclass(frozen=True)
class Package:
    """Installed Python package.

    Args:
        name: Name of the package in pip.
        version: Installed version.
        placeholder: The package is PyPI's placeholder, not AWS's package.
    """

    name: str
    version: str
    placeholder: bool = False


def installed(name: str) -> Package | None:
    """Find an installed package by name; None if the package is not installed."""
    try:
        package = distribution(name)
    except PackageNotFoundError:
        return None
    return Package(name, package.version, _PLACEHOLDER in (package.read_text("METADATA") or ""))


def detect() -> SdkVersion | None:
    """Neuron SDK release of the installed torch-neuronx; None if torch-neuronx is absent or unknown."""
    package = installed("torch-neuronx")
    if package is None or package.placeholder:
        return None
    ours = ".".join(package.version.split(".")[3:5])
    return next((sdk for sdk, release in RELEASES.items() if release.torch_neuronx == ours), None)


def support() -> Support:
    """Check if this machine can train on Neuron devices; the reason has one line for each missing part."""
    missing = list(missing_devices())
    packages = list(_wrong_packages())
    missing += [*packages, install_command()] if packages else []
    if missing:
        return Support(False, "\n    ".join(missing))
    return Support(True, f"{num_devices()} Neuron devices, SDK {detect()}")


def num_devices() -> int:
    """Number of Neuron devices (chips) that the driver shows."""
    return len(list(DEVICES.glob("neuron[0-9]*")))


def missing_devices() -> Iterator[str]:
    """Yield a message if this machine has no Neuron device."""
    if not num_devices():
        yield f"no Neuron device in {DEVICES}, as the driver of a Trainium instance makes them"


def distributed_support(*, allow_unverified: bool = False, assumed: Package | None = None) -> Support:
    """Check if the installed NeuronX Distributed can be used; if not, give the reason and the packages to install.

    The check imports no package.

    Args:
        allow_unverified: Allow a release outside `DISTRIBUTED`.
        assumed: Package of the machine that will run the job, used if this machine has none.
    """
    way_out = _install_distributed()
    package = installed("neuronx-distributed")
    if assumed is not None and (package is None or package.placeholder):
        package = assumed
    if package is None:
        return Support(False, f"neuronx-distributed is not installed; {way_out}")
    if package.placeholder:
        return Support(False, f"{placeholder(package)}; {way_out}")
    why = unverified(package)
    if why and not allow_unverified:
        return Support(False, f"{why}; {way_out}, or use it with backend.allow_unverified=true")
    torch = installed("torch")
    if torch is None or not torch.version.startswith("2.9."):
        wrong = torch.version if torch else "none"
        return Support(False, f"neuronx-distributed {package.version} is used with torch 2.9, not {wrong}")
    return Support(True, f"neuronx-distributed {package.version} is installed")


def unverified(package: Package) -> str:
    """Message that a release of NeuronX Distributed is unverified; empty for a release within `DISTRIBUTED`."""
    if _is_verified(package.version):
        return ""
    verified = " to ".join(".".join(map(str, version)) for version in DISTRIBUTED)
    return f"{package.name} {package.version} is not of {verified}, whose source nxtrain is verified with"


def unverified_notes() -> tuple[str, ...]:
    """Warning that the installed NeuronX Distributed is unverified; empty for a verified release."""
    package = installed("neuronx-distributed")
    why = unverified(package) if package else ""
    return (f"warning: {why}; it is used all the same, as backend.allow_unverified=true asks",) if why else ()


def _is_verified(version: str) -> bool:
    parts = version.split(".")[:2]
    return all(part.isdigit() for part in parts) and DISTRIBUTED[0] <= tuple(map(int, parts)) <= DISTRIBUTED[1]


def _install_distributed() -> str:
    """Command that installs a verified NeuronX Distributed for this Neuron SDK, or with another SDK if needed."""
    sdk = detect() or RECOMMENDED
    release = RELEASES[sdk].neuronx_distributed
    if _is_verified(release):
        return f"pip install --extra-index-url {PACKAGE_INDEX} 'neuronx-distributed=={release}.*'"
    pin = f"'neuronx-distributed=={RELEASES[RECOMMENDED].neuronx_distributed}.*'"
    return f"Neuron SDK {sdk} has {release} alone, which is not verified: {install_command()} {pin}"


def install_command(sdk: SdkVersion = RECOMMENDED) -> str:
    """Message with the pip command that installs a Neuron SDK release."""
    release = RELEASES[sdk]
    pins = f"'torch-neuronx==2.9.0.{release.torch_neuronx}.*' 'neuronx-cc=={release.neuronx_cc}.*'"
    return (
        f"install Neuron SDK {sdk}: pip install --extra-index-url {PACKAGE_INDEX} torch==2.9.0 torch-xla==2.9.0 {pins}"
    )


def _wrong_packages() -> Iterator[str]:
    for name in ("torch-neuronx", "neuronx-cc", "libneuronxla"):
        package = installed(name)
        if package is None:
            yield f"{name} is not installed"
        elif package.placeholder:
            yield placeholder(package)
        elif name == "torch-neuronx":
            yield from _misfits(package)
        elif name == "libneuronxla" and not package.version.startswith("2."):
            yield f"libneuronxla {package.version} is for JAX; torch-neuronx needs 2.2"
    distributed = installed("neuronx-distributed")
    if distributed is not None and distributed.placeholder:
        yield placeholder(distributed)


def is_torchneuron(version: str) -> bool:
    """True if a torch-neuronx version is TorchNeuron, such as 2.14.3.0.1, and not the package for PyTorch/XLA."""
    return version.split(".")[2:4] == ["3", "0"]


def placeholder(package: Package) -> str:
    """Message that an installed package is PyPI's empty placeholder, and not AWS's package."""
    return f"{package.name} {package.version} is PyPI's empty placeholder, not AWS's package"


def _misfits(torch_neuronx: Package) -> Iterator[str]:
    version = torch_neuronx.version
    if is_torchneuron(version):
        yield f"torch-neuronx {version} is TorchNeuron, which has no PyTorch/XLA: use backend.name=neuron-native"
        return
    if detect() is None:
        yield f"torch-neuronx {version} is of no known release of the SDK: {', '.join(map(str, RELEASES))}"
        return
    yield from misfits_of_torch(version)


def misfits_of_torch(torch_neuronx: str) -> Iterator[str]:
    """Yield a message if the installed torch does not match a version of torch-neuronx."""
    torch = installed("torch")
    wanted = ".".join(torch_neuronx.split(".")[:2])
    if torch is None or not torch.version.startswith(f"{wanted}."):
        yield f"torch-neuronx {torch_neuronx} needs torch {wanted}, not {torch.version if torch else 'none'}"
