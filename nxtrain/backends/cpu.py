"""CPU backend: collectives through shared memory or gloo, torch's kernels, and malloc settings that keep pages."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from nxtrain.backends.base import DEFAULTS, BackendSettings, Support
from nxtrain.backends.c10d import C10dBackend, C10dDiagnostics
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.cpu_native.build import LibraryBuildError, load
from nxtrain.backends.cpu_native.shared_memory import SharedMemoryCollectives
from nxtrain.backends.diagnostics import Diagnostics
from nxtrain.common.errors import BackendError


class CpuDiagnostics(C10dDiagnostics):
    """Memory and wait time of this CPU process."""

    def peak_memory_bytes(self) -> int:
        # Not getrusage: on Linux its peak survives exec, so a child begins with the peak of its parent.
        status = Path("/proc/self/status")
        if not status.exists():
            return 0
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].removesuffix("kB")) * 1024


class CpuBackend(C10dBackend):
    """Backend for CPU tensors, with one process per rank."""

    name = "cpu"
    compiler = "inductor"
    collectives: SharedMemoryCollectives
    diagnostics: Diagnostics = CpuDiagnostics()

    def __init__(self, settings: BackendSettings = DEFAULTS) -> None:
        self.compiles_at_first_use = settings.torch_compile
        self._read_placement()
        self.device = torch.device("cpu")
        keep_heap()
        self._shared = self.collectives = SharedMemoryCollectives(self.world)
        self._join("gloo", settings.hang_timeout_s, rejoined=settings.rejoined)
        self.kernels = self.host_kernels = CpuKernels()
        self._transport = self._transport_note = ""
        try:
            self.choose_transport(settings.cpu_transport)
        except BackendError:
            self.close()
            raise

    @staticmethod
    def support() -> Support:
        return Support(True, "every machine has a CPU")

    def choose_transport(self, wanted: str) -> None:
        """Choose the transport of collectives between ranks; all ranks call this.

        Args:
            wanted: `auto`, `gloo` or `shared_memory`.

        Raises:
            BackendError: The wanted transport cannot run.
        """
        if self.world == 1 or wanted == self._transport:
            return
        self._transport = wanted
        library, reason = None, ""
        if wanted == "gloo":
            reason = "as backend.cpu_transport=gloo asks"
        else:
            try:
                library = load()
            except LibraryBuildError as error:
                reason = str(error)
        reason = self._shared.share(library, reason)
        if reason and wanted == "shared_memory":
            raise BackendError(f"backend.cpu_transport=shared_memory cannot run here: {reason}; or use auto")
        if reason:
            self._transport_note = f"CPU collectives: gloo, {reason}"
        else:
            self._transport_note = "CPU collectives: shared memory, gloo between hosts"

    def close(self) -> None:
        super().close()
        self._shared.unshare()  # after a failure, too: other ranks then know at once that this one is gone

    def notes(self) -> tuple[str, ...]:
        if not self._transport_note:
            return super().notes()
        return (self._transport_note, *super().notes())

    def choose_float8(self, recipe: str, params: str) -> None:
        if recipe != "none":
            self.float8 = f"float8: {recipe}, emulated by casts and float32 products, slower than without"


def keep_heap() -> None:
    """Make glibc keep freed blocks instead of returning them to the kernel.

    A training step frees and allocates the same large activations again and again. By default each becomes a fresh
    mapping, whose pages the kernel must clear. Without glibc this function does nothing.
    """
    mmap_max, trim_threshold = -4, -1  # M_MMAP_MAX, M_TRIM_THRESHOLD in malloc.h
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, -1)
