"""Every import and call of NeuronX Distributed fits all of its recorded releases."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.backends.neuron.sdk import DISTRIBUTED, RELEASES, Package, unverified
from tests.support.nxd_contract import violations
from tests.support.nxd_signatures import COMMITS, FILE, Entry, dump, recorded, scan

ROOT = Path(__file__).parents[3] / "nxtrain" / "backends" / "neuron"
FILES = sorted(ROOT.rglob("*.py"))

TABLE = {
    "neuronx_distributed": Entry("module"),
    "neuronx_distributed.layers": Entry("module"),
    "neuronx_distributed.layers.Base": Entry("class", bases=["torch.nn.Module"]),
    "neuronx_distributed.layers.Base.__init__": Entry("method", ["self", "rank", "group=None"]),
    "neuronx_distributed.layers.Base.gather": Entry("method", ["self", "x"]),
    "neuronx_distributed.layers.Column": Entry("class", bases=["neuronx_distributed.layers.Base"]),
    "neuronx_distributed.layers.Column.forward": Entry("method", ["self", "x", "/", "*", "dim=0"]),
    "neuronx_distributed.layers.reduce": Entry("function", ["x", "*groups", "scale", "**options"]),
    "neuronx_distributed.layers.LIMIT": Entry("value"),
    "neuronx_distributed.Column": Entry("alias", target="neuronx_distributed.layers.Column"),
}
"""A release of few names."""

RIGHT = [
    "from neuronx_distributed.layers import Column as C\nC(1)\nC(rank=1, group=2)\nC(1, **options)\nC(*args)",
    "from neuronx_distributed import Column\nColumn(1).anything(2)",
    "from neuronx_distributed import layers\nlayers.reduce(1, 2, 3, scale=1.0, other=4)\nlayers.LIMIT.anything",
    "import neuronx_distributed.layers\nneuronx_distributed.layers.Column.gather(1, 2)",
    "import neuronx_distributed.layers as n\nn.reduce = print",
    "from neuronx_distributed.layers import Column\nclass A(Column):\n def forward(self, x):\n  super().__init__(1)\n"
    "  return super().forward(x, dim=1) + super().gather(x) + super().register_buffer('a', x)",
    "from torch import Column\nColumn(1, 2, 3, 4)",
]

MUTANTS = {
    "from neuronx_distributed.layers import Colum": "line 1: neuronx_distributed.layers.Colum is not among",
    "from neuronx_distributed.layer import Column": "line 1: neuronx_distributed.layer.Column is not",
    "import neuronx_distributed.layer": "line 1: neuronx_distributed.layer is not among",
    "from neuronx_distributed import layers\n\nlayers.reduces": "line 3: neuronx_distributed.layers.reduces is not",
    "import neuronx_distributed.layers as n\nn.reduces = print": "line 2: neuronx_distributed.layers.reduces is not",
    "from neuronx_distributed import Column\nColumn()": "missing a required argument: 'rank'",
    "from neuronx_distributed import Column\nColumn(1, grup=2)": "unexpected keyword argument 'grup'",
    "from neuronx_distributed import Column\nColumn(**a, grup=2)": "unexpected keyword argument 'grup'",
    "from neuronx_distributed import Column\nColumn(1, 2, 3)": "too many positional arguments",
    "from neuronx_distributed import Column\nColumn.gather(1)": "missing a required argument: 'x'",
    "from neuronx_distributed.layers import reduce\nreduce(1)": "missing a required argument: 'scale'",
    "from neuronx_distributed import Column\nclass A(Column):\n def f(self):\n  super().__init__(group=1)": "'rank'",
    "from neuronx_distributed import Column\nclass A(Column):\n def f(self):\n  super().forward(x=1)": "'x'",
    "from neuronx_distributed import Column\nclass A(Column):\n def f(self):\n  super().forward(1, 2)": "too many",
    "from neuronx_distributed import Column\nclass A(Column):\n def f(self):\n  super().fetch()": "has no fetch",
}


@pytest.mark.parametrize("source", RIGHT)
def test_use_that_fits_passes(source: str) -> None:
    assert violations(source, TABLE) == []


@pytest.mark.parametrize("source", MUTANTS)
def test_use_that_does_not_fit_is_named_with_its_line(source: str) -> None:
    (found,) = violations(source, TABLE)
    assert MUTANTS[source] in found


@pytest.mark.parametrize("version", COMMITS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_we_call_is_there_in_every_release(file: Path, version: str) -> None:
    assert violations(file.read_text(encoding="utf-8"), recorded()[version]) == []


def test_every_release_that_is_used_without_being_asked_is_recorded() -> None:
    """0.19, of SDK 2.30 and 2.31, has no public source, so nothing can be recorded of it."""
    known = {version.rpartition(".")[0] for version in COMMITS}
    first, last = DISTRIBUTED
    assert known == {f"0.{minor}" for minor in range(first[1], last[1] + 1)}
    shipped = {release.neuronx_distributed for release in RELEASES.values()}
    assert {version for version in shipped if not unverified(Package("neuronx-distributed", f"{version}.1"))} <= known
    assert shipped - known == {"0.19"}


def test_the_file_is_what_the_recorder_writes() -> None:
    assert dump(recorded()) == FILE.read_text(encoding="utf-8")


def test_a_source_tree_is_read_without_importing_it(tmp_path: Path) -> None:
    package = tmp_path / "neuronx_distributed"
    layers = package / "parallel_layers"
    layers.mkdir(parents=True)
    (package / "_version.py").write_text('__version__ = "1.2.0"\n')
    (package / "__init__.py").write_text("raise RuntimeError\nfrom .parallel_layers.layers import Column as C\n")
    (layers / "layers.py").write_text(
        "import torch\nfrom ..utils import cpu\n"
        "try:\n    LIMIT: int = 1\nexcept ImportError:\n    pass\n"
        "class Column(torch.nn.Module):\n    def __init__(self, a, /, b, *, c, d=(1, 2), **e): ...\n"
        "    def _hidden(self): ...\n"
        "    @staticmethod\n    def of(x=torch.float32, *args): ...\n"
        "class Fused(Column): ...\n"
        "if True:\n    def reduce(x): ...\n"
    )
    version, table = scan(tmp_path)
    assert version == "1.2.0"
    name = "neuronx_distributed.parallel_layers.layers"
    assert table == {
        "neuronx_distributed": Entry("module"),
        "neuronx_distributed.C": Entry("alias", target=f"{name}.Column"),
        name: Entry("module"),
        f"{name}.cpu": Entry("alias", target="neuronx_distributed.utils.cpu"),
        f"{name}.LIMIT": Entry("value"),
        f"{name}.Column": Entry("class", bases=["torch.nn.Module"]),
        f"{name}.Column.__init__": Entry("method", ["self", "a", "/", "b", "*", "c", "d=(1, 2)", "**e"]),
        f"{name}.Column.of": Entry("static", ["x=torch.float32", "*args"]),
        f"{name}.Fused": Entry("class", bases=[f"{name}.Column"]),
        f"{name}.reduce": Entry("function", ["x"]),
    }
