"""Detection of TorchNeuron, which makes Trainium2 and 3 PyTorch's device "neuron". Importable without torch.

The packages for TorchNeuron and for PyTorch/XLA are both named torch-neuronx, so an environment has only one of them.

Source: pages of https://awsdocs-neuron.readthedocs-hosted.com/en/latest, of Neuron SDK 2.33 (2026-10-19) and 2.33.1:
release-notes/components/torchneuron.html, release-notes/releasecontent.html (versions), setup/pytorch/
update-manual.html and update-dlami.html, torch/get-started/quickstart-torch-neuron.html (systems),
torch/about-pytorch-neuron.html. The runtime's folder and the driver's module: setup/pytorch/update-dlc.rst and
archive/appnotes/neuron1x/introducing-libnrt.rst in https://github.com/aws-neuron/aws-neuron-sdk at 81ce03a.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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

PINNED_TORCH = "2.14.0"
"""torch release that AWS lists for TorchNeuron. PyPI has a later 2.14.1, which AWS does not list."""

PYTHON = (3, 12)
"""Oldest Python version with TorchNeuron packages."""

# The versions below are those of Neuron SDK 2.33.
COMPILER = (2, 28)
"""Oldest version of the compiler, neuronx-cc, for TorchNeuron."""
KERNELS = (0, 7)
"""Oldest version of the package nki for TorchNeuron."""
DRIVER = (2, 31)
"""Oldest version of the Neuron driver (kernel module) for TorchNeuron."""
RUNTIME = (2, 35)
"""Oldest version of the Neuron runtime library for TorchNeuron."""

DRIVER_FILE = Path("/sys/module/neuron/version")
"""File with the version of the loaded Neuron driver (kernel module)."""

RUNTIME_FOLDER = Path("/opt/aws/neuron/lib")
"""Folder of the system's Neuron runtime library."""

OS_RELEASE = Path("/etc/os-release")
"""File with the name of the operating system."""

IMAGE = f"Deep Learning AMI Neuron torch-neuronx {TORCH[-1]}.0"
"""AWS machine image (AMI) with TorchNeuron, for Ubuntu 24.04 and 26.04."""

IMAGE_ENVIRONMENT = f"/opt/aws_neuronx_venv_torch_neuronx_{TORCH[-1].replace('.', '_')}_0"
"""Folder of the Python environment with TorchNeuron in `IMAGE`."""

SYSTEM_PACKAGES = ("aws-neuronx-dkms", "aws-neuronx-runtime-lib", "aws-neuronx-collectives", "aws-neuronx-tools")
"""Neuron system packages in AWS's apt repository."""

COMPILE_ONLY = "TORCH_NEURONX_COMPILE_ONLY"
"""Environment variable of TorchNeuron's mode that compiles without a device.

AWS documents the mode, but not the name of the variable.
"""

ELSEWHERE = (
    "use backend.name=neuron, PyTorch/XLA with packages of SDK 2.27 to 2.31, which AWS keeps for Trn1 and supports no "
    "longer for training"
)
"""Advice in messages for machines that cannot run TorchNeuron."""


def compiles_only(environ: Mapping[str, str]) -> bool:
    """True if TorchNeuron only compiles graphs and runs nothing, so the values of tensors are meaningless."""
    return environ.get(COMPILE_ONLY, "0") == "1"


def support(*, devices: bool = True) -> Support:
    """Check if this machine can train with TorchNeuron; the reason has one line for each missing part.

    Args:
        devices: Require Neuron devices and their driver; False for compilation only.
    """
    instance = this_machine()
    if instance is not None and instance.target in FIRST_GENERATION:
        reason = f"{instance.name} has chips of the first generation: TorchNeuron is for Trn2 and Trn3 only"
        return Support(False, f"{reason}\n    {ELSEWHERE}")
    parts = [part for part in _parts() if devices or part.name != "driver"]
    missing = missing_devices() if devices else ()
    lacking = [*_wrong_packages(), *missing, *filter(None, (part.misfit for part in parts))]
    if lacking:
        return Support(False, "\n    ".join([*lacking, install_advice(), f"or {ELSEWHERE}"]))
    package = installed("torch-neuronx")
    assert package is not None
    chips = f"{num_devices()} Neuron devices" if devices else "compilation without a device"
    return Support(True, ", ".join([chips, f"TorchNeuron {package.version}", *map(str, parts)]))


def detect() -> SdkVersion | None:
    """Neuron SDK release of the installed TorchNeuron; None if TorchNeuron is not installed."""
    package = installed("torch-neuronx")
    return SDK if package and not package.placeholder and is_torchneuron(package.version) else None


def pip_command() -> str:
    """pip command that installs TorchNeuron's Python packages."""
    indices = f"--extra-index-url {PACKAGE_INDEX} --extra-index-url https://download.pytorch.org/whl/cpu"
    pins = f"torch=={PINNED_TORCH} 'torch-neuronx=={TORCH[-1]}.3.0.*' 'neuronx-cc==2.*' nki"
    return f"pip install {indices} {pins}"


def install_advice(os_release: Path | None = None) -> str:
    """Installation instructions of TorchNeuron for this machine's operating system.

    Args:
        os_release: File with the name of the operating system; None for this machine's file.
    """
    name, version = _system(os_release or OS_RELEASE)
    start = f"install TorchNeuron, a public beta in Neuron SDK {SDK}, on a Trn2 or Trn3 instance: "
    if (name, version) == ("ubuntu", "26.04"):
        python = f"in an environment of Python {PYTHON[0]}.{PYTHON[1]} to 3.14, {pip_command()}"
        apt = f"sudo apt-get install {' '.join(SYSTEM_PACKAGES)} from https://apt.repos.neuron.amazonaws.com"
        return f"{start}{apt}; {python}"
    image = f"the image {IMAGE!r} of AWS has all of it in {IMAGE_ENVIRONMENT}"
    wheels = "outside of AWS's images, AWS's quickstart names Ubuntu 26.04 alone for its wheels"
    if (name, version) == ("ubuntu", "24.04"):
        return f"{start}{wheels}; on this Ubuntu 24.04, {image}, and AWS's container for PyTorch too"
    system = f"{name} {version}".strip() or "this system"
    built = " (on Ubuntu 22.04, build torch-neuronx from source)" if name == "ubuntu" else ""
    return f"{start}{wheels}, not for {system}{built}; for Ubuntu 24.04 and 26.04, {image}"


@dataclass(frozen=True)
class _Package:
    """Component of the Neuron SDK below torch: compiler, kernels, driver or runtime.

    Args:
        name: Name of the component in messages.
        version: Installed version; empty if unknown.
        least: Oldest supported version.
        required: A missing component is an error; False if the component may be installed elsewhere.
        fault: Defect other than the version; empty if there is none.
    """

    name: str
    version: str
    least: tuple[int, int]
    required: bool
    fault: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.version or 'of unknown version'}"

    @property
    def misfit(self) -> str:
        """Reason why TorchNeuron cannot use the component; empty if it can, or if its version is unknown."""
        if not self.version:
            return f"{self.name} is not installed" if self.required else ""
        numbers = tuple(int(number) for number in re.findall(r"\d+", self.version)[:2])
        if numbers < self.least:
            needed = ".".join(map(str, self.least))
            return f"{self.name} {self.version} is too old: TorchNeuron of Neuron SDK {SDK} needs {needed}"
        return self.fault


def _parts() -> list[_Package]:
    """Compiler, kernel package, driver and runtime installed on this machine."""
    compiler = _version("neuronx-cc")
    hidden = "" if shutil.which("neuronx-cc") else "neuronx-cc is not on PATH; activate the environment that has it"
    try:
        driver = DRIVER_FILE.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        driver = ""
    # The runtime is a system library with the version in its file name, or part of the Python package nrtpy.
    runtime = _version("nrtpy")
    libraries = sorted(path.name for path in RUNTIME_FOLDER.glob("libnrt.so.*.*"))
    if libraries:
        runtime = libraries[-1].removeprefix("libnrt.so.")
    return [
        _Package("neuronx-cc", compiler, COMPILER, required=True, fault=hidden),
        _Package("nki", _version("nki"), KERNELS, required=True),
        _Package("driver", driver, DRIVER, required=False),
        _Package("runtime", runtime, RUNTIME, required=False),
    ]


def _version(name: str) -> str:
    package = installed(name)
    return package.version if package and not package.placeholder else ""


def _system(os_release: Path) -> tuple[str, str]:
    """Identifier and version of the operating system, such as `ubuntu` and `24.04`."""
    try:
        lines = os_release.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "", ""
    fields = {}
    for line in lines:
        key, _, value = line.partition("=")
        fields[key] = value.strip("\"'")
    return fields.get("ID", ""), fields.get("VERSION_ID", "")


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
        running, needed = (".".join(map(str, version[:2])) for version in (sys.version_info, PYTHON))
        yield f"Python {running} is too old: TorchNeuron has packages for {needed} and newer"
