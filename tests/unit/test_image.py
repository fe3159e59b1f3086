"""`scripts/image/Dockerfile`: one file for both devices, whose steps are run here with programs that only report."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from nxtrain.launch.targets.docker import CPU_INDEX
from tests.support import ROOT

FILE = ROOT / "scripts/image/Dockerfile"
HADOLINT = Path(sysconfig.get_path("scripts"), "hadolint")
STAND_IN = '#!/bin/sh\necho "$(basename "$0") $*" >>"$LOG"\n'


def steps(name: str) -> Iterator[str]:
    """Arguments of all instructions of a name, with their continued lines."""
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    for instruction in "\n".join(lines).replace("\\\n", " ").splitlines():
        word, _, rest = instruction.partition(" ")
        if word == name:
            yield rest


def build(folder: Path, device: str) -> tuple[int, list[str], str]:
    """Run every RUN step with the image's shell; returns the exit code, what was called, and the messages."""
    programs = folder / "programs"
    programs.mkdir()
    for name in ("apt-get", "python3", "pip", "rm"):
        (programs / name).write_text(STAND_IN, encoding="utf-8")
        (programs / name).chmod(0o755)
    log = folder / "log"
    environ = {"PATH": f"{programs}:/usr/bin:/bin", "LOG": str(log), "DEVICE": device}
    for step in steps("RUN"):
        script = step.replace("/opt/nxtrain/bin/", "")
        done = subprocess.run(
            ["/bin/bash", "-euo", "pipefail", "-c", script], env=environ, capture_output=True, text=True, check=False
        )
        if done.returncode:
            break
    return done.returncode, log.read_text(encoding="utf-8").splitlines(), done.stderr


def test_hadolint_has_nothing_to_say() -> None:
    done = subprocess.run([HADOLINT, FILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(("device", "is_cuda"), [("cpu", False), ("cuda", True)])
def test_each_device_gets_its_extras_and_its_torch(tmp_path: Path, device: str, is_cuda: bool) -> None:
    code, called, said = build(tmp_path, device)
    assert code == 0, said
    (install,) = [line for line in called if line.startswith("pip install")]
    match = re.search(r"/src\[([\w,]+)\]", install)
    assert match
    extras = set(match[1].split(","))
    assert ("cuda" in extras) is is_cuda
    assert (f"--extra-index-url {CPU_INDEX}" in install) is not is_cuda
    declared = re.findall(r"^([\w-]+) = \[", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert extras <= {*declared}
    assert "python3 -m venv /opt/nxtrain" in called


def test_another_device_is_refused(tmp_path: Path) -> None:
    code, called, said = build(tmp_path, "tpu")
    assert (code, said) == (2, "DEVICE=tpu is neither cpu nor cuda\n")
    assert not [line for line in called if line.startswith("pip")]


def test_the_system_has_what_an_environment_needs(tmp_path: Path) -> None:
    _, called, _ = build(tmp_path, "cpu")
    (install,) = [line for line in called if line.startswith("apt-get install")]
    # scripts/setup.sh asks for a Python that makes environments and has headers; kernels for CPUs ask for a compiler.
    assert {"python3-venv", "python3-dev", "g++", "ca-certificates"} <= {*install.split()}


def test_the_context_has_what_the_package_is_built_from() -> None:
    lines = FILE.with_name("Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    needed = {"pyproject.toml", "LICENSE", *re.findall(r'^readme = "(.+)"', project, re.MULTILINE)}
    (folders,) = re.findall(r"^package-dir = \{(.+)\}", project, re.MULTILINE)
    needed |= set(re.findall(r'= "(\w+)"', folders))
    assert needed == {*kept}
    assert "*" in lines and not fnmatch.filter(kept, ".venv*")
