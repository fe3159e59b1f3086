"""The benchmark commands measure the same work on both sides, and what they print follows from it.

Speeds are for people: on a machine that others use no speed is a test. What is held here is counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from nxtrain.backends.cpu import CpuBackend
from nxtrain.bench import optim, worker
from nxtrain.bench.train import SHAPE, Workload
from nxtrain.family import find_family

SMALL = {**SHAPE, "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3}
BATCH, SEQ_LEN = 2, 64


def command(*argv: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "nxtrain", "bench", *argv, "--json"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def flops(shape: dict[str, int], tokens: int, seq_len: int) -> tuple[int, int]:
    """Of forward and backward: the products with weights, and those of causal attention, each token with half."""
    dim, layers = shape["hidden_size"], shape["num_hidden_layers"]
    kv = dim * shape["num_key_value_heads"] // shape["num_attention_heads"]
    weights = layers * (2 * dim * dim + 2 * dim * kv + 3 * dim * shape["intermediate_size"]) + dim * shape["vocab_size"]
    return 6 * weights * tokens, 6 * layers * dim * seq_len * tokens


def counted(turn: Any) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        turn()
    return {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_sides_of_bench_train_compute_the_products_that_the_formula_counts(precision: str) -> None:
    work = Workload(1, BATCH, SEQ_LEN, precision, {**SMALL, "max_position_embeddings": SEQ_LEN})
    products, attention = flops(SMALL, BATCH * SEQ_LEN, SEQ_LEN)
    ours, peer = (counted(side(work)) for side in (worker.ours, worker.peer))
    assert ours["aten.mm"] == peer["aten.mm"] == products
    assert ours["aten.bmm"] == 2 * attention  # a short sequence is one block, which is computed whole
    family = find_family("llama")
    formula = family.flops_per_token(family.config_type.model_validate(work.shape), SEQ_LEN)
    assert formula * BATCH * SEQ_LEN == products + attention


def test_bench_train_prints_speeds_in_units_of_the_peak() -> None:
    argv = ("--rounds", "1", "--steps", "1", "--batch", "1", "--seq-len", "32", "--precision", "fp32")
    found = command("train", *argv)
    products, attention = flops(SHAPE, tokens=1, seq_len=32)
    assert found["peak_flops"] > 0
    for name in ("nxtrain", "transformers"):
        side = found[name]
        assert side["tokens_per_s"] > 0
        assert side["mfu"] == pytest.approx(side["tokens_per_s"] * (products + attention) / found["peak_flops"])
    assert len(found["ratios"]) == 1


class Traffic(TorchDispatchMode):
    """Counts the bytes that operations read and write; views move none."""

    num_bytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            flat = torch.utils._pytree.tree_leaves((args, kwargs, result))
            self.num_bytes += sum(x.nbytes for x in flat if isinstance(x, Tensor))
        return result


def traffic(turn: Any) -> int:
    turn()  # the first makes what later ones reuse
    mode = Traffic()
    with mode:
        turn()
    return mode.num_bytes


TRAFFIC = {
    "fp32": 16.1,
    "fp32_master": 24.1,
    "bf16_stochastic": 84.5,
    "bf16_stochastic, bf16 state": 220.5,
    "bf16_kahan": 62.1,
    "bf16_kahan, bf16 state": 90.1,
}
"""Bytes per parameter that the operations of an update read and write, rounded up. One pass more over a bf16 tensor is
4 of them. A rule that comes to move less gets its new number."""


@pytest.mark.parametrize("case", optim.CASES, ids=lambda case: case.name)
def test_an_update_moves_no_more_memory_than_it_did(case: optim.Case) -> None:
    backend = CpuBackend()
    layout = optim._layout(backend, 1)
    grads = {name: torch.randn(spec.shape) * 1e-3 for name, spec in layout.table.items()}
    update, _ = optim._ours(case, layout, backend, grads)
    per_param = traffic(update) / layout.table.num_params()
    assert 0.95 * TRAFFIC[case.name] < per_param <= TRAFFIC[case.name]


def test_bench_optim_measures_every_rule_and_counts_its_bytes() -> None:
    rules = command("optim", "--layers", "1", "--rounds", "1")["rules"]
    assert all(rule["ns_per_param"] > 0 and rule["ratio"] > 0 for rule in rules.values())
    assert {name: round(rule["bytes_per_param"]) for name, rule in rules.items()} == {
        "torch.optim.AdamW(fused=True)": 12,
        "fp32": 12,
        "fp32_master": 14,
        "bf16_stochastic": 10,
        "bf16_stochastic, bf16 state": 6,
        "bf16_kahan": 12,
        "bf16_kahan, bf16 state": 8,
    }
