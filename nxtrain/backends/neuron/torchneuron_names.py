"""Check if the installed TorchNeuron reads an environment variable, by a text search in its packages' files.

AWS adds and removes variables between beta releases. An unknown variable has no effect and causes no error, so the
launcher sets only variables whose names the packages contain.
"""

from __future__ import annotations

import mmap
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from nxtrain.backends.neuron.torchneuron import detect

PACKAGES = ("torch-neuronx", "nki")
"""Python packages whose code reads TorchNeuron's environment variables."""

CODE = (".py", ".so", ".pyd")
"""File name extensions of code; a library may have a version number after the extension."""


def reads(name: str) -> bool | None:
    """True if the installed TorchNeuron contains the name of an environment variable; None if it is not installed."""
    if detect() is None:
        return None
    return any(_contains(file, name.encode("ascii")) for file in _files())


@lru_cache
def _files() -> tuple[Path, ...]:
    """Code files of the installed TorchNeuron packages, smallest first."""
    results: list[Path] = []
    for package in PACKAGES:
        try:
            names = distribution(package).files or ()
        except PackageNotFoundError:
            continue
        code = (Path(str(file.locate())) for file in names if set(file.suffixes) & set(CODE))
        results += [path for path in code if path.is_file()]
    return tuple(sorted(results, key=lambda path: path.stat().st_size))


@lru_cache(maxsize=4096)
def _contains(file: Path, name: bytes) -> bool:
    """True if a file contains a name as a whole word."""
    if not file.stat().st_size:
        return False
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as text:
        at = text.find(name)
        while at >= 0:
            ends = text[at - 1 : at] if at else b"", text[at + len(name) : at + len(name) + 1]
            if not any(end.isalnum() or end == b"_" for end in ends):
                return True
            at = text.find(name, at + 1)
    return False
