"""Tests run on copies of the tree that have one defect each, to find the defects that no test notices.

A process that has imported torch and pytest is forked for each run, since their imports take longer than most tests; it
has none of the library's own modules. Ranks are forked too, where tests would start fresh processes.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Literal

from tests.support.mutants import Mutant, mutants

Stages = tuple[tuple[str, ...], ...]
"""Selections of tests as pytest takes them, one run each, the quickest first."""

_PARITY = "tests/dist/test_drawn_parity.py"
_FAMILIES = "tests/dist/test_families.py"
_DP = ("tests/dist/test_data_parallel.py", "tests/dist/test_sharding_costs.py")
_RESHARDING = ("tests/dist/test_checkpoint_resharding.py", "tests/dist/test_checkpoint_shard_modes.py")
_UNIT_CHECKPOINT = ("tests/unit/checkpoint",)
_PLANS = (
    "memory",
    "adapters",
    "quantized_layouts",
    "search",
    "pipeline",
    "goodput",
    "hardware",
    "published",
    "command",
)
_PIPELINE = ("tests/dist/test_pipeline.py", "tests/dist/test_zero_bubble.py")

COVERED: dict[str, Stages] = {
    "nxtrain/parallel/data_parallel.py": (
        ("tests/unit/parallel/test_grads.py",),
        ("tests/dist/test_reduction_types.py", *_DP),
    ),
    "nxtrain/parallel/fully_sharded.py": (
        ("tests/unit/parallel/test_fully_sharded.py",),
        ("tests/dist/test_gathering_order.py", "tests/dist/test_offload.py", *_DP),
    ),
    "nxtrain/parallel/grads.py": (
        ("tests/unit/parallel/test_grads.py",),
        ("tests/dist/test_hardware_rounding.py", _FAMILIES, _PARITY, *_DP),
    ),
    "nxtrain/parallel/loss.py": (("tests/unit/parallel/test_loss.py",), ("tests/dist/test_loss.py", _PARITY)),
    "nxtrain/parallel/schedule.py": (("tests/unit/parallel/test_schedule.py",), _PIPELINE),
    "nxtrain/parallel/simulate.py": (("tests/unit/parallel/test_schedule.py", "tests/unit/plan"), _PIPELINE),
    "nxtrain/parallel/pipeline.py": (_PIPELINE,),
    "nxtrain/parallel/weight_grads.py": (_PIPELINE,),
    "nxtrain/parallel/linear.py": (
        ("tests/unit/parallel/test_linear.py", "tests/unit/models"),
        ("tests/dist/test_input_contract.py", "tests/dist/test_logits.py"),
        ("tests/dist/test_zero_bubble.py", "tests/xla/test_graphs_pipeline.py"),
    ),
    "nxtrain/parallel/*": (
        ("tests/unit/models", "tests/unit/nn"),
        ("tests/dist/test_input_contract.py", "tests/dist/test_logits.py", _PARITY),
    ),
    "nxtrain/plan/*": (
        tuple(f"tests/unit/plan/test_{name}.py" for name in _PLANS),
        ("tests/unit/tools/trace/test_fake_rank.py", "tests/dist/test_plan_peaks.py"),
    ),
    "nxtrain/optim/loss_scale.py": (("tests/unit/optim/test_loss_scale.py",), ("tests/dist/test_fp16.py",)),
    "nxtrain/nn/offload.py": (("tests/unit/nn/test_offload.py",), ("tests/dist/test_data_parallel.py",)),
    "nxtrain/nn/lora.py": (("tests/dist/test_lora.py",), ("tests/train/test_finetuning.py",)),
    "nxtrain/optim/*": (("tests/unit/optim",), ("tests/dist/test_update_rules.py",)),
    "nxtrain/nn/*": (("tests/unit/nn", "tests/unit/models"), ("tests/dist/test_logits.py", _FAMILIES, _PARITY)),
    "models/*": (("tests/unit/models",), ("tests/dist/test_logits.py", _FAMILIES, _PARITY)),
    "nxtrain/checkpoint/convert/nxd_*": (_UNIT_CHECKPOINT, ("tests/train/test_nxd_conversion.py",)),
    "nxtrain/checkpoint/mirror.py": (_UNIT_CHECKPOINT, ("tests/train/test_mirror_runs.py",)),
    "nxtrain/checkpoint/resume*": (
        _UNIT_CHECKPOINT,
        ("tests/train/test_resume.py", "tests/train/test_mirror_runs.py", "tests/faults/test_returns.py"),
    ),
    "nxtrain/common/io/object_store.py": (
        ("tests/unit/checkpoint/test_mirror.py", "tests/unit/tools/compile/test_sync.py"),
        _UNIT_CHECKPOINT,
        ("tests/train/test_mirror_runs.py",),
    ),
    "nxtrain/checkpoint/*": (_UNIT_CHECKPOINT, _RESHARDING, ("tests/train/test_resume.py",)),
}
"""By source file, the tests that should notice a defect in it; the first pattern that fits counts."""

CARRIED = ("nxtrain", "models", "tests", "configs", "scripts", "pyproject.toml")
"""Names at the top of the repository that a copy has."""

PRELOADED = (
    *("numpy", "pytest", "torch", "torch.distributed.fsdp", "torch.distributed.checkpoint"),
    *("torch.multiprocessing", "transformers", "transformers.models.llama.modeling_llama", "safetensors.torch"),
)


_QUIET = ("-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning")  # plugins that were imported early


@dataclass(frozen=True)
class Drawn:
    """A mutant of a file."""

    path: str
    mutant: Mutant

    def __str__(self) -> str:
        return f"{self.path}:{self.mutant.line} {self.mutant}"


@dataclass(frozen=True)
class Outcome:
    """Fate of a mutant."""

    kind: Literal["killed", "survived", "timeout"]
    by: str
    time_s: float

    def __str__(self) -> str:
        words = {"killed": f"killed by {self.by}", "survived": "SURVIVED", "timeout": f"timeout in {self.by}"}
        return f"{words[self.kind]} ({self.time_s:.0f} s)"


@dataclass
class Score:
    """Outcomes of a folder."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def noticed(self) -> int:
        return sum(outcome.kind != "survived" for outcome in self.outcomes)

    def __str__(self) -> str:
        total = len(self.outcomes)
        timeouts = sum(outcome.kind == "timeout" for outcome in self.outcomes)
        return (
            f"{self.noticed} of {total} noticed ({self.noticed / max(1, total):.0%}), {timeouts} of them by a timeout"
        )


def stages_of(path: str) -> Stages:
    """The selections that cover a source file."""
    return next(stages for pattern, stages in COVERED.items() if fnmatch(path, pattern))


def sources(tree: Path, paths: Sequence[str]) -> list[str]:
    """The source files that are or lie below some paths, relative to the tree."""
    found: list[Path] = []
    for path in paths:
        whole = tree / path
        found += sorted(whole.rglob("*.py")) if whole.is_dir() else [whole]
    return [path.relative_to(tree).as_posix() for path in found]


def draw(tree: Path, paths: Sequence[str], number: int, seed: int, operators: Sequence[str] = ()) -> list[Drawn]:
    """Mutants of some files, kinds of defects in turn, so that rare ones are among few."""
    by_operator: dict[str, list[Drawn]] = {}
    for path in sources(tree, paths):
        for mutant in mutants((tree / path).read_text(encoding="utf-8")):
            if not operators or mutant.operator in operators:
                by_operator.setdefault(mutant.operator, []).append(Drawn(path, mutant))
    generator = Random(seed)
    for each in by_operator.values():
        generator.shuffle(each)
    rounds = zip_longest(*(by_operator[operator] for operator in sorted(by_operator)))
    found = (drawn for round_ in rounds for drawn in round_ if drawn is not None and _compiles(drawn))
    return [drawn for drawn, _ in zip(found, range(number), strict=False)]


def _compiles(drawn: Drawn) -> bool:
    try:
        compile(drawn.mutant.source, drawn.path, "exec")
    except SyntaxError:
        return False
    return True


class Tree:
    """A copy of the repository in which defects are tried one after the other."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.path, self._folder = root, folder / "tree", folder
        self.path.mkdir()
        for name in CARRIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, self.path / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(root / name, self.path / name)
        self._writes = 0

    def check(self, stages: Stages) -> list[float]:
        """Seconds that the tests take without a defect."""
        seconds = []
        for selection in stages:
            began = time.monotonic()
            code, by, output = self._pytest(selection, limit_s=3600.0)
            if code:
                raise RuntimeError(f"{by or ' '.join(selection)} fails without any defect:\n{output[-4000:]}")
            seconds.append(time.monotonic() - began)
        return seconds

    def outcome(self, drawn: Drawn, stages: Stages, limits_s: Sequence[float]) -> Outcome:
        """Run tests on a mutant until one fails."""
        began = time.monotonic()
        self._write(drawn.path, drawn.mutant.source)
        try:
            for selection, limit_s in zip(stages, limits_s, strict=True):
                code, by, _ = self._pytest(selection, limit_s)
                if code is None:
                    return Outcome("timeout", " ".join(selection), time.monotonic() - began)
                if code:
                    return Outcome("killed", by or " ".join(selection), time.monotonic() - began)
            return Outcome("survived", "", time.monotonic() - began)
        finally:
            self._write(drawn.path, (self.root / drawn.path).read_text(encoding="utf-8"))

    def _write(self, path: str, source: str) -> None:
        target = self.path / path
        target.write_text(source, encoding="utf-8")
        self._writes += 1
        then = 1_000_000_000 + self._writes  # compiled files are known by the second that their source was written in
        os.utime(target, (then, then))

    def _pytest(self, selection: Sequence[str], limit_s: float) -> tuple[int | None, str, str]:
        """The exit code of a run, None where it took too long; the first test that failed; its output."""
        log, scratch = self._folder / "log", self._folder / "scratch"
        shutil.rmtree(scratch, ignore_errors=True)
        sys.stdout.flush()
        child = os.fork()
        if not child:
            _become_pytest(self.path, scratch, log, selection)
        code = _wait(child, limit_s)
        output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return code, found[1] if found else "", output


def preload() -> None:
    """Import the packages that the library needs, and nothing of the library."""
    for name in PRELOADED:
        import_module(name)
    import_module("torch").set_num_threads(1)


def _wait(child: int, limit_s: float) -> int | None:
    """The exit code of a process group's first process, which ends with all that it has started."""
    deadline, code = time.monotonic() + limit_s, None
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if code is None:
        os.waitpid(child, 0)
    return code


def _become_pytest(tree: Path, scratch: Path, log: Path, selection: Sequence[str]) -> None:
    """Run tests of a copy in this process, which was forked for it, and end it."""
    code = 70
    try:
        os.setsid()
        os.chdir(tree)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(out, stream)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("nxtrain", "nxtrain_models", "tests")]:
            del sys.modules[name]
        sys.modules["__main__"] = ModuleType("__main__")  # fresh processes would run the script
        root = str(Path(__file__).parents[2])
        sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in (root, "", str(tree)))]
        os.environ["PYTHONPATH"] = str(tree)
        _fork_ranks()
        import pytest

        nxtrain = import_module("nxtrain")
        assert Path(str(nxtrain.__file__)).is_relative_to(tree), nxtrain.__file__
        # What runs alone measures memory or time, of which a fork of this process has its own.
        chosen = ["-x", "-q", "-m", "not alone", "-p", "no:cacheprovider"]
        options = [*chosen, "--no-header", "--tb=line", f"--basetemp={scratch}", *_QUIET]
        code = int(pytest.main([*options, *selection]))
    except BaseException as error:
        os.write(2, f"ERROR {type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def _fork_ranks() -> None:
    if "torch.multiprocessing" in sys.modules:
        context = multiprocessing.get_context("fork")
        vars(sys.modules["torch.multiprocessing"])["get_context"] = lambda method=None: context


def limits(seconds: Sequence[float], most_s: float) -> list[float]:
    """Seconds that each selection may take on a mutant: thrice its usual time and a minute for a busy machine."""
    return [min(most_s, 60.0 + 3.0 * usual) for usual in seconds]


def play(tree: Tree, drawn: Sequence[Drawn], *, quick: bool, most_s: float) -> Iterator[tuple[Drawn, Outcome]]:
    """The fate of each mutant."""
    usual: dict[tuple[str, ...], float] = {}
    for each in drawn:
        stages = stages_of(each.path)
        stages = stages[:1] if quick else stages
        for selection in stages:
            if selection not in usual:
                (usual[selection],) = tree.check((selection,))
        yield each, tree.outcome(each, stages, limits([usual[selection] for selection in stages], most_s))
