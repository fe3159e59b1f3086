"""Build of the C++ sources with the machine's compiler, once per compiler, torch and CPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from nxtrain.common.errors import BackendError
from nxtrain.common.io.atomic import replacing
from nxtrain.common.process.console import standard_error
from nxtrain.common.process.placement import Placement

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.cpp", "exchange.cpp"))
COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-fno-strict-aliasing"),
    # Reductions are marked one by one in the source. Order of sums, infinities and NaN stay as IEEE 754 has them.
    *("-fno-math-errno", "-fno-trapping-math"),
)
BUILD_TIMEOUT_S = 300


class KernelBuildError(BackendError):
    """The kernels cannot be built or loaded here; the text says why and what helps."""


@cache
def load() -> ctypes.CDLL:
    """Library of kernels and collectives; the first call on a machine builds the library, in a few seconds.

    Raises:
        KernelBuildError: No compiler, no folder to write to, or a compiler that fails.
    """
    try:
        library = cache_folder(os.environ) / f"{_key(find_compiler())}.so"
        if not library.exists():
            _build(library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelBuildError(str(error)) from None


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Folder of built libraries, in the user's cache."""
    base = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "nxtrain" / "cpu_native"


def _key(compiler: str) -> str:
    """Hash of all that the library depends on."""
    binary = Path(compiler).resolve()
    stat = binary.stat()
    texts = tuple(source.read_text() for source in SOURCES)
    parts = (texts, str(binary), stat.st_size, stat.st_mtime_ns, FLAGS, torch.__version__, _torch_folder())
    return hashlib.sha256(repr((*parts, _cpu_flags())).encode()).hexdigest()[:32]


def _cpu_flags() -> str:
    """Instruction sets of this CPU, since a shared home may serve machines of several kinds."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _torch_folder() -> Path:
    return Path(torch.__file__).parent / "lib"


def _build(library: Path) -> None:
    if Placement.read().local_rank == 0:
        standard_error().print("compiling the CPU kernels, once on this machine", markup=False)
    library.parent.mkdir(parents=True, exist_ok=True)
    # Ranks that start together may each build; the last rename wins, and all results are equal.
    with replacing(library, durable=False, shared=True) as out:
        compile_library(SOURCES, out, FLAGS)


def compile_library(sources: Sequence[Path], library: Path, flags: Sequence[str]) -> None:
    """Compile sources that use torch's matrix products.

    Raises:
        KernelBuildError: There is no compiler, or the compiler fails.
    """
    compiler, folder = find_compiler(), _torch_folder()
    files = [*map(str, sources), "-o", str(library)]
    argv = [compiler, *flags, *files, f"-L{folder}", f"-Wl,-rpath,{folder}", "-ltorch_cpu"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise KernelBuildError(f"{compiler} did not end within {BUILD_TIMEOUT_S} s") from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200].strip())
        raise KernelBuildError(f"{compiler} failed: {first}")


def find_compiler() -> str:
    """Path of the C++ compiler.

    Raises:
        KernelBuildError: There is none.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if platform.system() != "Linux" or compiler is None:
        raise KernelBuildError("no C++ compiler is on PATH; Debian and Ubuntu: apt install g++")
    return compiler
