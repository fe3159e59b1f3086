"""Stages that run programs of their own and meet in between, on several XLA devices with real collectives.

The reference is the same chain of blocks on whole tensors in one process.
"""

from __future__ import annotations

import pytest

from nxtrain.mesh import Mesh
from tests.support.xla_engine import run_devices
from tests.support.xla_stages import expected, stages

STEPS = 4
LAYOUTS = {
    "pp2 x tp2": Mesh(4, 0, pp_size=2, tp_size=2),
    "pp2 x tp2, permuted": Mesh(4, 0, pp_size=2, tp_size=2, order=(1, 2, 3, 0)),
    "pp4": Mesh(4, 0, pp_size=4),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_all(name, tmp_path):
    found = run_devices(4, stages, LAYOUTS[name], STEPS, folder=tmp_path)
    print(expected(LAYOUTS[name].pp_size, STEPS))
    for p in found:
        print(p.losses, p.norms, p.compiled)
        for g in p.graphs:
            print([("A" if x.text else "-") + x.hash[:5] for x in g])
    texts = {g.hash: g.text for p in found for s in p.graphs for g in s if g.text}
    for h, t in texts.items():
        print(h[:5], t)
    assert 0
