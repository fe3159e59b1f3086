"""Names of environment variables that the installed TorchNeuron reads, found as text in the files of its packages.

AWS's page of variables changes between releases, and variables of a beta come and go. A variable that nothing reads has
no effect and no error, so the launcher sets only names that the packages contain.
"""

from __future__ import annotations

import mmap
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from nxtrain.backends.neuron.torchneuron import detect

PACKAGES = ("torch-neuronx", "nki")
"""Packages whose code reads variables of TorchNeuron."""

CODE = (".py", ".so", ".pyd")
"""Endings of files with code; libraries may have a version after the ending."""


def reads(name: str) -> bool | None:
    """True if the installed packages contain a variable's name; None if TorchNeuron is not installed here."""
    if detect() is None:
        return None
    return any(_contains(file, name.encode("ascii")) for file in _files())


@lru_cache
def _files() -> tuple[Path, ...]:
    """Files with code of the installed packages, small ones first."""
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
    """True if the name is in the file as a whole word."""
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
