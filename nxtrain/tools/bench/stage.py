"""The process of `nxtrain bench materialize`: build a stage without storage, fill this rank's shard.

python -m nxtrain.tools.bench.stage TARGET
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from nxtrain.backends import open_backend
from nxtrain.common.family import find_family
from nxtrain.common.mesh import Mesh
from nxtrain.common.sharding import ParamTable
from nxtrain.config.check import Resolved
from nxtrain.config.schema import RunConfig
from nxtrain.nn.init import draw
from nxtrain.tools.bench.materialize import FAMILY, SEQ_LEN, BuildTarget
from nxtrain.train.build import build_meta, fill_model, parts_of


def measure(target: BuildTarget) -> dict[str, Any]:
    """Make a shard as a run makes it; the mesh is data, so no other rank need exist."""
    tables = {
        "parallel": {"tp": target.tp, "pp": target.pp},
        "train": {"seq_len": SEQ_LEN},
        "precision": {"params": "bf16", "update": "fp32_master"},
    }
    family = find_family(FAMILY)
    plan = Resolved(RunConfig.model_validate(tables), family, family.preset(target.preset))
    backend = open_backend("cpu")
    mesh = Mesh.build(target.tp * target.pp, target.rank, tp=target.tp, pp=target.pp)
    before_bytes = backend.diagnostics.peak_memory_bytes()
    start = time.perf_counter()
    model = build_meta(plan, backend, mesh)
    (part,) = parts_of(plan, mesh)
    built = time.perf_counter()
    fill_model(plan, model, backend, mesh, draw(ParamTable.of(model), mesh.tp, plan.config.run.seed))
    filled = time.perf_counter()
    return {
        "blocks": [part.blocks[0], part.blocks[-1]],
        "num_params": family.num_params(plan.model),
        "shard_params": sum(parameter.numel() for parameter in model.parameters()),
        "shard_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "before_bytes": before_bytes,
        "peak_bytes": backend.diagnostics.peak_memory_bytes(),
        "meta_s": built - start,
        "fill_s": filled - built,
    }


if __name__ == "__main__":
    print(json.dumps(measure(BuildTarget(**json.loads(sys.argv[1])))))
