"""Tests that need a device or a vendor's package are skipped where it is absent, with the reason."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

SKIPS_FILE = "NXTRAIN_TEST_SKIPS"
"""Variable with the file to which each lane appends what it skipped; `scripts/test.sh` prints it at its end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ask each kind of device once, and only when a test needs it: the answer imports torch."""
    for marker, why_not in _WHY_NOT.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = why_not() if marked else ""
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Append what was skipped, for a summary of all lanes."""
    if file := os.environ.get(SKIPS_FILE):
        with Path(file).open("a", encoding="utf-8") as out:
            out.writelines(f"{line}\n" for line in skips(terminalreporter.stats.get("skipped", ())))


def skips(reports: Iterable[pytest.TestReport]) -> list[str]:
    """One line for each lane and reason, with the number of its tests."""
    found = Counter[tuple[str, str]]()
    for report in reports:
        lane = (*Path(report.nodeid.partition("::")[0]).parts, "", "")[1]
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        found[lane, " ".join(reason.removeprefix("Skipped: ").split())] += 1
    return [f"{lane:7} {number:5} skipped: {reason}" for (lane, reason), number in sorted(found.items())]


def _why_no_cuda() -> str:
    from nxtrain.backends.cuda import CudaBackend

    support = CudaBackend.support()
    return "" if support.ok else support.reason


def _why_no_package(name: str) -> Callable[[], str]:
    return lambda: "" if find_spec(name) else f"{name} is not installed"


def why_no_nxd() -> str:
    """Names that NeuronX Distributed needs and that do not import here, with the way to run its tests; empty: none."""
    needed = [name for name in ("neuronx_distributed", "tenacity", "boto3") if not find_spec(name)]
    if "neuronx_distributed" not in needed and not find_spec("transformers.utils.fx"):
        needed.append("transformers<4.52")
    return f"no {', '.join(needed)}: bash scripts/test.sh nxd --source DIR" if needed else ""


_WHY_NOT = {
    "cuda": _why_no_cuda,
    "neuron": _why_no_package("torch_neuronx"),
    "nxd": why_no_nxd,
}
