"""The recorded names and signatures of NeuronX Distributed are those of the installed release."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.nxd_cpu import PACKAGE, recorded, scan

ROOT = Path(__file__).parents[2]

INSPECTED = """
import inspect, json, sys
from importlib import import_module
from tests.support import nxd_cpu

nxd_cpu.prepare()
found = {}
for name in json.load(sys.stdin):
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            value = import_module(".".join(parts[:cut]))
            break
        except ModuleNotFoundError:
            pass
    for part in parts[cut:]:
        value = inspect.getattr_static(value, part) if inspect.isclass(value) else getattr(value, part)
    value = getattr(value, "__func__", value)
    if inspect.isfunction(value):
        parameters = inspect.signature(value).parameters.values()
        found[name] = [(p.name, p.kind.name, p.default is not p.empty) for p in parameters]
print("\\n" + json.dumps(found))
"""
"""Program that prints the signatures of names of the imported package."""


@pytest.mark.nxd
def test_the_recorded_signatures_are_those_of_the_installed_release() -> None:
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    version, table = scan(Path(spec.origin).parents[1])
    assert version in recorded(), f"{version} is not recorded yet; tests/golden/README.md says how"
    assert table == recorded()[version]

    names = [name for name, entry in table.items() if entry.kind in ("function", "method", "static")]
    argv = [sys.executable, "-c", INSPECTED]
    done = subprocess.run(argv, input=json.dumps(names), cwd=ROOT, capture_output=True, text=True, check=True)
    inspected = json.loads(done.stdout.splitlines()[-1])
    assert len(inspected) > 0.9 * len(names)
    for name, parameters in inspected.items():
        expected = table[name].signature().parameters.values()
        assert parameters == [[p.name, p.kind.name, p.default is not p.empty] for p in expected], name
