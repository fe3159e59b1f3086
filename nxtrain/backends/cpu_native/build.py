"""Build of the C++ collectives with the machine's compiler, once per compiler and CPU."""

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

from nxtrain.common.errors import BackendError
from nxtrain.common.io.atomic import replacing
from nxtrain.common.process.console import standard_error
from nxtrain.common.process.placement import Placement

SOURCE = Path(__file__).with_name("exchange.cpp")
COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-fno-strict-aliasing"),
    # Order of sums, infinities and NaN stay as IEEE 754 has them.
    *("-fno-math-errno", "-fno-trapping-math"),
)
BUILD_TIMEOUT_S = 300


class LibraryBuildError(BackendError):
    """Error for a library of CPU collectives that cannot be built or loaded, with the reason and a remedy."""


@cache
def load() -> ctypes.CDLL:
    """Load the C++ library of CPU collectives; the first call on a machine builds the library in a few seconds.

    Raises:
        LibraryBuildError: There is no compiler, no writable folder, or the compiler fails.
    """
    try:
        library = cache_folder(os.environ) / f"{_key(find_compiler())}.so"
        if not library.exists():
            if Placement.read().local_rank == 0:
                standard_error().print("compiling the CPU collectives, once on this machine", markup=False)
            library.parent.mkdir(parents=True, exist_ok=True)
            # Ranks that start together may each build; the last rename wins, and all results are equal.
            with replacing(library, durable=False, shared=True) as out:
                compile_library(SOURCE, out, FLAGS)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise LibraryBuildError(str(error)) from None


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Folder of built C++ libraries, in the user's cache folder."""
    base = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "nxtrain" / "cpu_native"


def _key(compiler: str) -> str:
    """Cache key of the C++ library: a hash of source, compiler, flags and instruction sets of the CPU."""
    binary = Path(compiler).resolve()
    stat = binary.stat()
    # The instruction sets of this CPU, since a shared home may serve machines of several kinds.
    cpu_lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu_flags = next((line for line in cpu_lines if line.startswith(("flags", "Features"))), "")
    parts = (SOURCE.read_text(), str(binary), stat.st_size, stat.st_mtime_ns, FLAGS, cpu_flags)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def compile_library(source: Path, library: Path, flags: Sequence[str]) -> None:
    """Compile a C++ source file to a shared library.

    Raises:
        LibraryBuildError: There is no compiler, or the compiler fails.
    """
    compiler = find_compiler()
    argv = [compiler, *flags, str(source), "-o", str(library)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise LibraryBuildError(f"{compiler} did not finish the CPU collectives within {BUILD_TIMEOUT_S} s") from None
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200].strip())
        raise LibraryBuildError(f"{compiler} failed: {first}")


def find_compiler() -> str:
    """Path of the first C++ compiler on PATH.

    Raises:
        LibraryBuildError: PATH has no C++ compiler, or the system is not Linux.
    """
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if platform.system() != "Linux" or compiler is None:
        raise LibraryBuildError("no C++ compiler is on PATH; Debian and Ubuntu: apt install g++")
    return compiler
