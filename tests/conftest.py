"""The tests that are chosen, and the reasons of those that are not.

Tests that need a device or a vendor's package are skipped where it is absent, those marked `slow` unless `--slow` asks
for them. `--alone` and `--quick` choose among the others.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import tests.support.processes  # noqa: F401  # the commands of nxtrain are kept once built

SKIPS_FILE = "NXTRAIN_TEST_SKIPS"
"""Variable with the file to which each lane appends what it skipped; `scripts/test.sh` prints it at its end."""

DURATIONS_FILE = Path(__file__).with_name("durations.json")
"""Seconds of each test that takes longer than `QUICK_S`, as `--record-durations` wrote them.

`--quick` leaves these tests out, and workers take the files with most of them first.
"""

QUICK_S = 0.1

# transformers would import torch-xla for a device that it never gets here, in seconds of each process.
os.environ.setdefault("USE_TORCH_XLA", "0")
# As in scripts/lanes.sh: a test that calls `nxtrain train` in its own process must not start anew with other threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Else each process that compiles for the CPU builds and starts a program for each set of instructions, in 20 seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

_USUAL = gc.get_threshold()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the choices of `scripts/test.sh`."""
    group = parser.getgroup("nxtrain")
    group.addoption("--slow", action="store_true", help="run the tests that repeat a proof at a larger size, too")
    group.addoption("--quick", action="store_true", help=f"the tests that {DURATIONS_FILE.name} does not name")
    group.addoption("--record-durations", action="store_true", help=f"write {DURATIONS_FILE.name}, on an idle machine")
    group.addoption("--alone", choices=("only", "without"), help="the tests that nothing may run beside, or the others")


def pytest_configure(config: pytest.Config) -> None:
    """Record durations where that is asked for; workers report theirs to the controller."""
    # Limits of time per drawn input would fail by what else the machine does: the first one imports libraries.
    settings.register_profile("nxtrain", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("nxtrain")
    gc.set_threshold(1_000_000, *_USUAL[1:])  # while modules are imported, little is garbage, and visits take seconds
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without the marker `alone` where only such tests run: imports of all files take seconds."""
    if config.getoption("--alone") != "only" or collection_path.suffix != ".py":
        return None
    return None if _names_alone(collection_path) else True


def _names_alone(file: Path) -> bool:
    return b"mark.alone" in file.read_bytes()


def pytest_collection_finish() -> None:
    """Collect garbage as usual, without visiting what was imported."""
    gc.freeze()
    gc.set_threshold(*_USUAL)


def pytest_runtest_setup() -> None:
    """Let the random numbers of a test be the same, whatever tests its process has run before."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Ask each kind of device once, and only when a test needs it: the answer imports torch."""
    if choice := config.getoption("--alone"):
        alone = [item for item in items if item.get_closest_marker("alone")]
        if hidden := {str(item.path) for item in alone if not _names_alone(item.path)}:
            raise pytest.UsageError(
                f"--alone=only would not find the marker in {hidden}; write pytest.mark.alone there"
            )
        _keep(config, items, lambda item: bool(item.get_closest_marker("alone")) == (choice == "only"))
    if config.getoption("--quick"):
        durations = _durations()
        _keep(config, items, lambda item: item.nodeid not in durations)
    if hasattr(config, "workerinput"):
        _put_longest_file_first(items)
    reasons = dict(_WHY_NOT)
    if config.getoption("--slow"):
        del reasons["slow"]
    for marker, why_not in reasons.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        reason = why_not() if marked else ""
        if reason:
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=reason))


def _keep(config: pytest.Config, items: list[pytest.Item], wanted: Callable[[pytest.Item], bool]) -> None:
    left_out = [item for item in items if not wanted(item)]
    items[:] = [item for item in items if wanted(item)]
    config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Append what was skipped, for a summary of all lanes; a worker's part is in that of its controller."""
    if (file := os.environ.get(SKIPS_FILE)) and not hasattr(config, "workerinput"):
        with Path(file).open("a", encoding="utf-8") as out:
            out.writelines(f"{line}\n" for line in skips(terminalreporter.stats.get("skipped", ())))


def skips(reports: Iterable[pytest.TestReport]) -> list[str]:
    """One line for each lane and reason, with the number of its tests."""
    results = Counter[tuple[str, str]]()
    for report in reports:
        lane = (*Path(report.nodeid.partition("::")[0]).parts, "", "")[1]
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        results[lane, " ".join(reason.removeprefix("Skipped: ").split())] += 1
    return [f"{lane:8} {number:5} skipped: {reason}" for (lane, reason), number in sorted(results.items())]


def _durations() -> dict[str, float]:
    result: dict[str, float] = json.loads(DURATIONS_FILE.read_text(encoding="utf-8")) if DURATIONS_FILE.exists() else {}
    return result


def _put_longest_file_first(items: list[pytest.Item]) -> None:
    """Order the files that workers take, so that none of them begins the longest one at the end."""
    total = Counter[str]()
    for test, seconds in _durations().items():
        total[test.partition("::")[0]] += round(seconds)
    items.sort(key=lambda item: -total[item.nodeid.partition("::")[0]])


class Durations:
    """Writes the tests that take long; what a run did not choose keeps its line while its file exists."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test's setup, call and teardown."""
        self._seconds[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Write the file, sorted."""
        result = {test: seconds for test, seconds in _durations().items() if Path(test.partition("::")[0]).exists()}
        result |= {test: round(seconds, 1) for test, seconds in self._seconds.items()}
        checkout = str(DURATIONS_FILE.parents[1])  # an id with a path of this machine is not a test of another one
        lasting = {test: result[test] for test in sorted(result) if result[test] > QUICK_S and checkout not in test}
        DURATIONS_FILE.write_text(json.dumps(lasting, indent=1) + "\n", encoding="utf-8")


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


def _why_not_slow() -> str:
    return "repeats a proof at a larger size: bash scripts/test.sh --slow"


_WHY_NOT = {
    "slow": _why_not_slow,
    "cuda": _why_no_cuda,
    "neuron": _why_no_package("torch_neuronx"),
    "nxd": why_no_nxd,
}
