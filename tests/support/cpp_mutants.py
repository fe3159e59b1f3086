"""Libraries of a C++ source with one defect each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from nxtrain.backends.cpu_native import build


def mutant_libraries(
    source: Path, mutants: Mapping[str, tuple[str, str]], flags: Sequence[str], folder: Path
) -> dict[str, str]:
    """Compile a source once for each defect.

    Args:
        source: The C++ file.
        mutants: By name of the defect, a text of the source and its replacement.
        flags: Of the compiler.
        folder: For sources and libraries.

    Returns:
        The library of each defect.
    """
    text, found = source.read_text(), {}
    for number, (name, (right, wrong)) in enumerate(mutants.items()):
        assert right in text, f"{name}: {source.name} has no {right!r}"
        path = folder / f"{number}.cpp"
        path.write_text(text.replace(right, wrong))
        build.compile_library(path, path.with_suffix(".so"), flags)
        found[name] = str(path.with_suffix(".so"))
    return found
