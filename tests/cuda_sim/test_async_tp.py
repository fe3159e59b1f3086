"""Products that torch's compiler joins with the collectives of tensor parallelism, in the graphs of a pretended GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest

from tests.support.cuda_sim import SimulatedGpu, play

SHAPE = {"vocab_size": 512, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}


def collectives_of_blocks(backend: Any, async_tp: bool) -> Counter[str]:
    """Collectives, alone or joined with products, in both graphs of a block; of the first of two ranks."""
    import torch
    from torch._inductor import compile_fx
    from torch.distributed._symmetric_memory import _test_mode

    from nxtrain.tools.trace.fake_rank import zero_batch
    from nxtrain.train.build import build_model, build_state, mesh_of
    from nxtrain.train.step import train_step
    from tests.support.models import plan

    counts = Counter[str]()
    optimize = compile_fx.post_grad_passes

    def counting(module: Any, is_inference: bool) -> None:
        optimize(module, is_inference)
        for node in module.graph.nodes:
            library, _, name = str(node.target).partition(".")
            if library in ("symm_mem", "_c10d_functional") and not name.startswith("wait"):
                counts[name.partition(".")[0]] += 1

    resolved = plan(
        "gqa2",
        model={"config": SHAPE},
        parallel={"tp": 2, "sequence_parallel": True, "async_tp": async_tp},
        precision={"params": "bf16", "update": "fp32_master"},
        train={"seq_len": 256, "global_batch": 2, "micro_batch": 2},
        compile={"torch_compile": True},
    )
    mesh = mesh_of(resolved, backend)
    backend.lay_out(mesh)
    if backend.rank:
        return counts
    torch._dynamo.reset()
    caches = torch._inductor.config.patch(fx_graph_cache=False)
    # Joined operations compute what they are made of: the pretended GPU has no symmetric memory.
    with _test_mode(), caches, patch.object(compile_fx, "post_grad_passes", counting):
        state = build_state(resolved, build_model(resolved, backend, mesh, init="zeros"), backend, mesh)
        train_step(state, zero_batch(resolved, state), 1e-3)
    return counts


@pytest.mark.parametrize("async_tp", [False, True])
def test_every_collective_of_a_block_is_joined_with_a_product(gpu: SimulatedGpu, async_tp: bool) -> None:
    counts, _ = gpu.run(play, 2, collectives_of_blocks, async_tp)
    names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    if not async_tp:
        names = ("all_gather_into_tensor", "reduce_scatter_tensor")
    of_loss = {"all_reduce_": 2}  # the graph of the loss reduces over the divided vocabulary
    assert counts == {**dict.fromkeys(names, 4), **of_loss}
