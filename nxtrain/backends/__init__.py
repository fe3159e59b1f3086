"""Device backends: kernels, collectives between ranks, and bindings to vendors' libraries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nxtrain.backends.xla.environment import EXTRACTION, extracting
from nxtrain.common.errors import BackendError

if TYPE_CHECKING:
    from nxtrain.backends.base import Backend, BackendSettings, Support
    from nxtrain.backends.neuron.sdk import Package

GPU_DEVICES = Path("/dev")
"""Folder of the device files of NVIDIA's driver: `nvidia0`, `nvidia1` and so on, or `dxg` under WSL."""

# An environment has the torch-neuronx of TorchNeuron or the one of PyTorch/XLA, never both: the first two entries
# exclude each other, and the recommended one comes first.
_ORDER = ("neuron-native", "neuron", "cuda", "cpu")


def choose(name: str, *, in_full: bool = False) -> tuple[str, str]:
    """Return the name of the backend to open, and the reason for the choice.

    `auto` takes the first backend that can run on this machine. It never chooses PyTorch/XLA, which is for tests on
    machines without an accelerator.

    Args:
        name: Value of `backend.name`.
        in_full: Name in the reason each backend that cannot run here, with its obstacle.

    Raises:
        BackendError: No backend can run here.
    """
    if name != "auto":
        return name, f"backend.name={name}"
    reasons = []
    for candidate in _ORDER:
        supported = _load(candidate).support()
        reasons.append(f"{candidate}: {supported.reason.splitlines()[0]}")
        if supported.ok and in_full:
            return candidate, "; ".join(reasons)
        if supported.ok and candidate == "cpu":
            return candidate, "backend.name=auto: no accelerator can run here; recovery.debug=dist says why"
        if supported.ok:
            return candidate, f"backend.name=auto: {supported.reason.splitlines()[0]}"
    raise BackendError("no backend can run here: " + "; ".join(reasons))


def support(name: str) -> Support:
    """Check if a backend can run on this machine, and give the reason; the check claims no device.

    Raises:
        BackendError: The name is not a backend.
    """
    return _load(name).support()


def device_support(name: str, environ: Mapping[str, str]) -> Support:
    """Check if this machine has the devices of the configured backend; `auto`, `cpu` and `xla` run on any machine.

    torch is imported for GPUs only, and only where the driver shows no device file of a GPU.

    Args:
        name: Value of `backend.name`.
        environ: Environment variables of the run's ranks.
    """
    from nxtrain.backends.base import Support
    from nxtrain.backends.neuron import sdk, torchneuron

    if name == "neuron":
        return sdk.support()
    if name == "neuron-native":
        return torchneuron.support(devices=not torchneuron.compiles_only(environ))
    if name == "cuda" and not [*GPU_DEVICES.glob("nvidia[0-9]*"), *GPU_DEVICES.glob("dxg")]:
        return support(name)
    return Support(True, "ranks find their devices themselves")


def num_gpus() -> int:
    """Number of GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible.

    Raises:
        BackendError: No GPU is visible.
    """
    supported = support("cuda")
    if not supported.ok:
        raise BackendError(f"--nproc gpu finds no GPU: {supported.reason}; give the number of ranks, as --nproc 2")
    import torch

    return torch.cuda.device_count()


def choose_layers(
    name: str,
    backend: str,
    *,
    allow_unverified: bool = False,
    assumed: Package | None = None,
    needs_own: str = "",
) -> tuple[str, str]:
    """Choose the implementation of the tensor parallel layers: return `native` or `nxd`, and the reason.

    `auto` takes the layers of NeuronX Distributed on Neuron devices. On other devices `auto` takes nxtrain's own
    layers, and the reason is empty.

    Args:
        name: `auto`, `native` or `nxd`.
        backend: Name of the chosen backend.
        allow_unverified: Allow releases of NeuronX Distributed that nxtrain is not verified with.
        assumed: Release of NeuronX Distributed on the target machine, used if this machine has none.
        needs_own: Reason why the run needs nxtrain's own layers; empty if both implementations can run.

    Raises:
        BackendError: `nxd` cannot run on this machine; the message gives the reason.
    """
    if name == "native":
        return name, "backend.layers=native"
    if name == "auto" and backend != "neuron":
        return "native", ""
    if name == "auto" and needs_own:
        return "native", needs_own
    from nxtrain.backends.base import Support
    from nxtrain.backends.neuron.sdk import distributed_support

    # For tests, NeuronX Distributed's own switch allows a CPU.
    if backend == "neuron" or (backend == "cpu" and os.environ.get("NXD_CPU_MODE", "0") == "1"):
        supported = distributed_support(allow_unverified=allow_unverified, assumed=assumed)
    else:
        supported = Support(False, f"NeuronX Distributed runs on backend.name=neuron, not on {backend}")
    if name == "nxd":
        if not supported.ok:
            raise BackendError(f"backend.layers=nxd cannot run here: {supported.reason}; or use backend.layers=native")
        return name, supported.reason
    return "nxd" if supported.ok else "native", supported.reason


def open_backend(name: str, settings: BackendSettings | None = None, layers: str = "native") -> Backend:
    """Claim this rank's device and join the process group.

    Args:
        name: `cpu`, `cuda`, `xla`, `neuron` or `neuron-native`.
        settings: Settings of the run; None for the settings of commands that do not train.
        layers: `native` or `nxd`.

    Raises:
        BackendError: The backend or the layers cannot run on this machine; the message gives the reason.
    """
    from nxtrain.backends.base import DEFAULTS

    backend = _load(name)(settings or DEFAULTS)
    if extracting(os.environ) and not backend.extracts:
        backend.close()
        raise BackendError(
            f"{EXTRACTION}=1, set by neuron_parallel_compile, requests graph extraction for Neuron devices, but "
            f"backend.name={name} would train; unset it, or use backend.name=neuron on a Trainium instance"
        )
    if layers == "nxd":
        from nxtrain.backends.neuron.nxd.binding import NxdBinding

        try:
            backend.binding = NxdBinding(backend.device)
        except BackendError:
            backend.close()
            raise
    return backend


def _load(name: str) -> type[Backend]:
    if name == "cpu":
        from nxtrain.backends.cpu import CpuBackend

        return CpuBackend
    if name == "cuda":
        from nxtrain.backends.cuda import CudaBackend

        return CudaBackend
    if name == "xla":
        from nxtrain.backends.xla.backend import XlaBackend

        return XlaBackend
    if name == "neuron":
        from nxtrain.backends.neuron.backend import NeuronBackend

        return NeuronBackend
    if name == "neuron-native":
        from nxtrain.backends.neuron.native import NeuronNativeBackend

        return NeuronNativeBackend
    raise BackendError(f"there is no backend {name!r}; known: cpu, cuda, xla, neuron, neuron-native")
