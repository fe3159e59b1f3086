"""Extras of the project resolve on every Python that docs/quickstart.md gives, from wheels of the package index.

The packages of AWS are on AWS's index only. Where that index is not configured, `neuron` and `neuron-native` must be
refused, since PyPI has placeholders under the same names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

from nxtrain.backends.neuron import torchneuron
from nxtrain.backends.neuron.sdk import RECOMMENDED, RELEASES
from tests.support import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
PYTHONS = [f"3.{minor}" for minor in range(10, 15)]
UV = Path(sysconfig.get_path("scripts"), "uv")
SOURCES = ("rouge-score", "sqlitedict", "word2number")
"""Packages of pure Python that lm_eval needs, and that the index has as sources only."""

PASS_SETTINGS = 'source scripts/setup.sh; pass_pip_settings_to_uv; exec "$@"'

needs_uv = pytest.mark.skipif(not UV.exists(), reason="no uv in this environment: pip install '.[dev]'")


class UnresolvedError(Exception):
    """Requirements that the index cannot satisfy, in uv's words."""


class UnreachableError(Exception):
    """Index that does not answer, in uv's words."""


def uv(*argv: object, environ: Mapping[str, str] | None = None) -> str:
    """Output of uv with the index that pip's variables name."""
    command = ["bash", "-c", PASS_SETTINGS, "bash", UV, *argv]
    env = {**os.environ, **(environ or {})}
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    if done.returncode == 0:
        return done.stdout
    words = " ".join(done.stderr.split())  # uv breaks lines
    raise (UnreachableError if re.search(r"Failed to fetch|error sending request", words) else UnresolvedError)(words)


def resolve(
    extras: list[str], python: str, *options: str, project: Path = ROOT, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Versions of the packages that some extras need on a Python, all of them as wheels."""
    argv: list[object] = ["pip", "compile", "--quiet", "--no-header", "--no-annotate", "--only-binary", ":all:"]
    argv += [word for package in SOURCES for word in ("--no-binary", package)]
    argv += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28", *options]
    argv += [word for extra in extras for word in ("--extra", extra)]
    lines = uv(*argv, project / "pyproject.toml", environ=environ).split()
    return dict(line.split("==", 1) for line in lines if "==" in line)


def resolve_or_skip(extras: list[str], python: str, *options: str, project: Path = ROOT) -> dict[str, str]:
    """The same; a package index that does not answer skips the test."""
    try:
        return resolve(extras, python, *options, project=project)
    except UnreachableError as error:
        pytest.skip(f"the package index does not answer: {error}")


def documented() -> dict[str, tuple[list[str], str]]:
    """Pythons and index of each extra, as the table of docs/quickstart.md has them; "" is the plain package."""
    rows = dict[str, tuple[list[str], str]]()
    for line in (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8").splitlines():
        if result := re.fullmatch(r"\| (none|`([\w-]+)`) \| .* \| 3\.(\d+) to 3\.(\d+) \| (\w+) \|", line):
            rows[result[2] or ""] = ([f"3.{minor}" for minor in range(int(result[3]), int(result[4]) + 1)], result[5])
    return rows


TABLE = documented()


def of_pypi(python: str) -> list[str]:
    """Extras that PyPI has for a Python."""
    return [extra for extra, (pythons, index) in TABLE.items() if extra and index == "PyPI" and python in pythons]


def minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def test_documents_and_metadata_name_the_same_extras_and_pythons() -> None:
    assert TABLE.keys() == EXTRAS.keys() | {""}
    assert {extra for extra, (_, index) in TABLE.items() if index == "AWS"} == {"neuron", "neuron-native"}
    assert PROJECT["requires-python"] == f">={PYTHONS[0]},<3.{minor(PYTHONS[-1])[1] + 1}"
    named = [result[1] for text in PROJECT["classifiers"] if (result := re.search(r"Python :: (3\.\d+)", text))]
    assert named == PYTHONS == TABLE[""][0]


def test_every_requirement_has_two_bounds() -> None:
    requirements = [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    bounded = [line for line in requirements if re.search(r"==|>=.*,<|^setuptools<", line)]
    assert [line for line in requirements if line not in bounded and not line.startswith("nxtrain[")] == []


def test_packages_of_aws_are_those_of_one_release() -> None:
    release = RELEASES[RECOMMENDED]
    assert {
        "nxtrain[nxd,xla]",
        f"torch-neuronx==2.9.0.{release.torch_neuronx}.*",
        f"neuronx-cc=={release.neuronx_cc}.*",
        f"neuronx-distributed=={release.neuronx_distributed}.*",
    } < set(EXTRAS["neuron"])
    assert (TABLE["neuron"][0][0], TABLE["neuron"][0][-1]) == release.python
    newest = torchneuron.TORCH[-1]
    assert {f"torch=={torchneuron.PINNED_TORCH}", f"torch-neuronx=={newest}.3.0.*"} < set(EXTRAS["neuron-native"])
    assert torchneuron.PINNED_TORCH.startswith(f"{newest}.")
    assert TABLE["neuron-native"][0][0] == ".".join(map(str, torchneuron.PYTHON))


HERE = ".".join(map(str, sys.version_info[:2]))
"""Python of the tests. The index of packages takes seconds for each other one."""


@needs_uv
@pytest.mark.parametrize(
    "python", [pytest.param(python, marks=[pytest.mark.slow] if python != HERE else []) for python in PYTHONS]
)
def test_extras_of_pypi_resolve_together_on_a_python(python: str) -> None:
    """Each of them alone resolves, too: it asks for less."""
    extras = of_pypi(python)
    assert {"cuda", "s3", "dev"} <= set(extras)
    result = resolve_or_skip(extras, python)
    assert {"triton", "boto3", "pytest"} <= result.keys()
    assert (result["torch"], result.get("torch-xla")) == ("2.9.0", "2.9.0") or "xla" not in extras
    assert result["transformers"].startswith("4.51.") or "nxd" not in extras


@needs_uv
@pytest.mark.parametrize(
    ("extra", "python"), [("neuron", HERE), pytest.param("neuron-native", "3.12", marks=pytest.mark.slow)]
)
def test_extras_of_aws_refuse_the_placeholders_of_pypi(extra: str, python: str) -> None:
    """This machine cannot resolve them further: torch-neuronx, neuronx-cc and nki are on AWS's index alone."""
    try:
        result = resolve_or_skip([extra], python)
    except UnresolvedError as error:
        words = str(error)
    else:  # AWS's index is configured
        assert minor(result["torch-neuronx"]) >= (2, 9)
        return
    assert re.search(r"only (torch-neuronx|neuronx-cc|neuronx-distributed|libneuronxla|nki)==[01]\.", words)
    assert "unsatisfiable" in words


SUBSET = (
    "tests/unit/config/test_load.py",
    "tests/unit/config/test_check.py",
    "tests/unit/config/test_show.py",
    "tests/unit/test_cli.py",
    "tests/unit/test_transcript.py",
    "tests/unit/test_s3.py",
    "tests/unit/metrics/test_sinks.py",
    "tests/unit/metrics/test_progress.py",
    "tests/unit/data/test_tokenization.py",
    "tests/unit/data/test_seal.py",
    "tests/unit/data/test_prepared_corpus.py",
    "tests/unit/data/test_bucket_sources.py",
    "tests/unit/common/io/test_hub.py",
    "tests/unit/checkpoint/convert/test_hf_folder.py",
)
"""Tests of the code that calls pydantic, typer, rich, boto3, tensorboard, tokenizers, numpy, pyarrow, xxhash, Hub."""


@needs_uv
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_oldest_versions_of_the_ranges_work(tmp_path: Path) -> None:
    """An environment has the oldest versions; torch and the tools come from the environment of the tests."""
    oldest = resolve_or_skip(["s3"], HERE, "--resolution", "lowest-direct")
    assert minor(oldest["torch"]) == (2, 9)
    lent = re.compile(r"torch|triton|nvidia-|cuda-|sympy$|mpmath$|networkx$|fsspec$|filelock$|jinja2$|setuptools$")
    pins = [f"{name}=={version}" for name, version in oldest.items() if not lent.match(name)]
    assert {"pydantic==2.12.0", "typer==0.29.0", "boto3==1.28.0", "tensorboard==2.18.0"} <= set(pins)
    (tmp_path / "oldest.txt").write_text("\n".join(pins), encoding="utf-8")
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    uv("pip", "install", "--quiet", "--no-deps", "--python", python, "-r", tmp_path / "oldest.txt")
    packages = tmp_path / "venv" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    lend = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages / "zz_lent.pth").write_text(lend, encoding="utf-8")
    ask = "import pydantic, numpy; print(pydantic.__version__, numpy.__version__)"
    answer = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert answer.split() == [oldest["pydantic"], oldest["numpy"]]
    argv = [str(python), "-m", "pytest", *SUBSET, "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d{2,} passed", done.stdout)
    shutil.rmtree(tmp_path / "venv")
