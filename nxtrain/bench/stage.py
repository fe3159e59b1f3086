"""The process of `nxtrain bench materialize`: build a model without storage, keep one stage, fill this rank's shard.

python -m nxtrain.bench.stage TARGET
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, cast

from torch import nn

from nxtrain.backends import open_backend
from nxtrain.bench.materialize import FAMILY, SEQ_LEN, Target
from nxtrain.config.check import Resolved
from nxtrain.config.schema import RunConfig
from nxtrain.family import CausalLM, find_family
from nxtrain.mesh import Mesh
from nxtrain.nn.init import draw
from nxtrain.sharding import ParamTable
from nxtrain.train.build import build_meta, fill_model


def measure(target: Target) -> dict[str, Any]:
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
    before_bytes = backend.peak_memory_bytes()
    start = time.perf_counter()
    model = build_meta(plan, backend, mesh)
    num_params = ParamTable.of(model).num_params()
    blocks = keep_stage(model, target.pp, target.stage)
    built = time.perf_counter()
    fill_model(plan, model, backend, mesh, draw(ParamTable.of(model), mesh.tp, plan.config.run.seed))
    filled = time.perf_counter()
    return {
        "blocks": [blocks[0], blocks[-1]],
        "num_params": num_params,
        "shard_params": sum(parameter.numel() for parameter in model.parameters()),
        "shard_bytes": sum(parameter.nbytes for parameter in model.parameters()),
        "before_bytes": before_bytes,
        "peak_bytes": backend.peak_memory_bytes(),
        "meta_s": built - start,
        "fill_s": filled - built,
    }


def keep_stage(model: nn.Module, pp: int, stage: int) -> range:
    """Put the identity in place of what other pipeline stages hold; what stays keeps its name.

    Parameters before the blocks are the first stage's, those after them the last's.

    Args:
        model: A `CausalLM`.
        pp: Stages.
        stage: The one to keep.

    Returns:
        Its blocks.
    """
    blocks = cast(CausalLM, model).blocks
    kept = stage_blocks(len(blocks), pp, stage)
    within = {id(module) for block in blocks for module in block.modules()}
    num_passed = 0
    for name, module in list(model.named_modules()):
        if any(module is block for block in blocks[num_passed : num_passed + 1]):
            stays = num_passed in kept
            num_passed += 1
        elif id(module) not in within and next(module.parameters(recurse=False), None) is not None:
            stays = stage == (pp - 1 if num_passed else 0)
        else:
            continue
        if not stays:
            model.set_submodule(name, nn.Identity())
    return kept


def stage_blocks(num_blocks: int, pp: int, stage: int) -> range:
    """The blocks of a stage, cut as evenly as can be: where pp does not divide them, the first stages have one more."""
    width, extra = divmod(num_blocks, pp)
    start = stage * width + min(stage, extra)
    return range(start, start + width + (stage < extra))


if __name__ == "__main__":
    print(json.dumps(measure(Target(**json.loads(sys.argv[1])))))
