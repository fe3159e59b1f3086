"""Start-up of a run, of its agent and of a trace: collections of garbage, imported packages, and their number."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from tests.support import runs

# Runs the command line beside records of collections. The modules that torch imports itself do not count.
CODE = """
import atexit, gc, json, sys
gc.disable()
import torch
by_torch = {*sys.modules}
gc.collect()
gc.enable()
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
from nxtrain.common.process import garbage
usual, settle, facts = gc.get_threshold(), garbage.settle, {}
@atexit.register
def report():
    print(json.dumps({**facts, "left": len(gc.get_objects())}))
def observed():
    facts["starting"] = gc.get_threshold()
    facts["collections"] = len(collections)
    settle()
    facts["frozen"] = gc.get_freeze_count()
garbage.settle = observed
from nxtrain.__main__ import main
collections.clear()
try:
    main()
except SystemExit as ended:
    facts["code"] = ended.code
facts["usual"] = gc.get_threshold() == usual
facts["modules"] = sorted({*sys.modules} - by_torch)
"""

# Runs a program, whose last line has the objects that are left at its end.
PROGRAM = """
import atexit, gc, json, runpy, sys
facts, collections = {"began": False}, []
@atexit.register
def report():
    print(json.dumps({**facts, "left": len(gc.get_objects())}))
from nxtrain.common.process import garbage
rarely, settle = garbage.collect_rarely, garbage.settle
def began():
    rarely()
    facts["began"] = True
    gc.callbacks.append(lambda phase, info: collections.append(phase))
def observed():
    facts["collections"], facts["torch"] = len(collections), "torch" in sys.modules
    settle()
    facts["settled"] = gc.get_threshold()[0] < garbage.STARTING
garbage.collect_rarely, garbage.settle = began, observed
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
JOB = dict.fromkeys(("config", "overrides", "world", "ranks", "steps", "hlo", "layers", "instance"), "absent")

PACKAGES = {"annotated_doc", "annotated_types", "cython_runtime", "nxtrain", "nxtrain_models", "numpy", "pydantic"}
PACKAGES |= {"pydantic_core", "rich", "safetensors", "shellingham", "tokenizers", "torch", "typer", "typing_extensions"}
PACKAGES |= {"attr", "typing_inspection", "xxhash"}  # rich 13 imports attr where it is installed
"""Packages that a run imports beside torch's own, without TensorBoard and without checkpoints."""

MOST_MODULES = 700


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Records of one run of one step, which computes whole blocks again."""
    folder = tmp_path_factory.mktemp("run")
    config = runs.write_toml(folder, train={"steps": 1, "remat": "full"}, checkpoint={"every": 0})
    argv = [sys.executable, "-c", CODE, "train", str(config)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    records: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert records["code"] == 0
    return records


def test_nothing_is_collected_while_a_run_is_imported(facts: dict[str, Any]) -> None:
    assert facts["collections"] == 0
    assert facts["starting"][0] > 2 * facts["frozen"]  # of which torch alone makes more than half


def test_a_run_collects_as_usual_but_not_what_was_imported(facts: dict[str, Any]) -> None:
    assert facts["usual"]
    assert facts["frozen"] > 200_000


def test_the_end_of_a_process_visits_nothing(facts: dict[str, Any]) -> None:
    assert facts["left"] < 100


# `_checkpoint_without_reentrant_generator_impl` of torch 2.15 asks torch._dynamo for a setting, in eager runs as well.
@pytest.mark.skipif(
    TorchVersion(torch.__version__) >= "2.15", reason="activation checkpointing of torch 2.15 imports torch's compiler"
)
def test_the_first_step_imports_only_what_it_needs(facts: dict[str, Any]) -> None:
    modules = set[str](facts["modules"])
    packages = {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - PACKAGES
    assert {package for package in packages if not package.startswith("_")} == set()
    assert len(modules) < MOST_MODULES


@pytest.mark.parametrize(
    "program",
    [("nxtrain.launch.torchrun", "--help"), ("nxtrain.tools.trace.trace", json.dumps(JOB))],
    ids=lambda p: p[0],
)
def test_an_agent_and_a_trace_collect_nothing_while_they_are_imported(program: tuple[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *program], capture_output=True, text=True, timeout=120, check=False
    )
    result = json.loads(done.stdout.splitlines()[-1])
    left = result.pop("left")
    assert result == {"began": True, "collections": 0, "torch": True, "settled": True}, done.stderr
    assert left < 1000


# An object that only the collector can free, and that is older than the start of the usual collections.
ENDS = """
import os, sys, types
from nxtrain.common.process import garbage
garbage.collect_rarely()
sys.modules.update((name, types.ModuleType(name)) for name in sys.argv[1:])
class Bound:
    def __init__(self):
        self.itself = self
    def __del__(self):
        os.write(1, b"freed")
Bound()
garbage.settle()
"""


@pytest.mark.parametrize(("imported", "expected"), [((), b""), (("triton",), b"freed")])
def test_only_bindings_that_report_leaks_are_freed_at_the_end(imported: tuple[str, ...], expected: bytes) -> None:
    """The bindings of Triton 3.9, which torch 2.15 needs, print thirty lines if they are not freed."""
    done = subprocess.run([sys.executable, "-c", ENDS, *imported], capture_output=True, timeout=60, check=True)
    assert done.stdout == expected
