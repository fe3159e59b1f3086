"""Names that the library takes from NeuronX Distributed: few, and none of those known to be wrong."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = "neuronx_distributed"
LIBRARY = sorted((Path(__file__).parents[3] / "nxtrain").rglob("*.py"))

TAKEN = {
    "kernels.flash_attn": {"nki_flash_attn_func"},
    "parallel_layers.layers": {"ColumnParallelLinear", "ParallelEmbedding", "RowParallelLinear"},
    "parallel_layers.grads": {"bucket_allreduce_gradients"},
    "parallel_layers.utils": {"set_tensor_model_parallel_attributes"},
    "parallel_layers.parallel_state": {
        "destroy_model_parallel",
        "get_data_parallel_replica_groups",
        "get_expert_data_parallel_replica_groups",
        "get_pipeline_model_parallel_replica_groups",
        "get_tensor_model_parallel_replica_groups",
        "initialize_model_parallel",
        "model_parallel_is_initialized",
    },
    "parallel_layers": {"comm", "grads", "mappings", "parallel_state"},  # whose names are given other values
}
"""By module of `neuronx_distributed`."""

AVOIDED = {
    "4.2, 4.3, 4.4 and 4.6: fused and replicated K/V heads": {"GQAQKVColumnParallelLinear"},
    "4.7: K/V heads in converted checkpoints": {"CheckpointConverterBase"},
    "4.8: ignored targets, overwritten logits": {"parallel_cross_entropy"},
    "4.9: norms summed in the gradients' type": {"get_grad_norm", "clip_grad_norm", "clip_grads_with_norm"},
    "4.11: the loss of a tuple": {"NxDModel", "initialize_parallel_model", "neuronx_distributed_config"},
    "4.13: ZeRO-1 with its own limit of the norm": {"NeuronZero1Optimizer", "initialize_parallel_optimizer"},
}
"""By number of the defect; 4.12 is in a script of its own."""


def imports(path: Path) -> set[tuple[str, str]]:
    """Modules and names that a file imports from the package."""
    results = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            results |= {(str(node.module), alias.name) for alias in node.names}
        if isinstance(node, ast.Import):
            results |= {(alias.name, "") for alias in node.names if alias.name.split(".")[0] == PACKAGE}
    return results


def test_only_the_named_functions_are_taken_and_only_by_the_binding_and_the_flash_kernel() -> None:
    taken = {path: imports(path) for path in LIBRARY if imports(path)}
    assert {path.parent.name for path in taken if path.name != "flash.py"} == {"nxd"}
    expected = {(f"{PACKAGE}.{module}", name) for module, names in TAKEN.items() for name in names}
    assert set().union(*taken.values()) == expected


@pytest.mark.parametrize("defect", AVOIDED)
def test_what_is_wrong_is_never_named(defect: str) -> None:
    binding = [path for path in LIBRARY if path.parent.name == "nxd"]
    named = {
        getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "name", None)
        for path in binding
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert "ColumnParallelLinear" in named
    assert not named & AVOIDED[defect]
