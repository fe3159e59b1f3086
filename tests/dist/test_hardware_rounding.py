"""Copies of a parameter stay equal bit for bit where the hardware rounds every cast by a stream of each rank's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nxtrain.backends.base import Backend
from nxtrain.backends.neuron.backend import NeuronKernels
from nxtrain.backends.torch_kernels import PlainKernels
from nxtrain.common.sharding import Layout
from nxtrain.config.check import Resolved
from nxtrain.optim import adamw
from nxtrain.optim.rounding import rounding_keys
from nxtrain.parallel import grads
from nxtrain.train.health.replica_check import ReplicaCheck
from nxtrain.train.step import TrainState, train_step
from tests.support.models import changed, weights_of
from tests.support.parity import LR, batches, layout, local_batch, start
from tests.support.ranks import RankPool

Entries = dict[tuple[str, str, tuple[int, ...]], Tensor]
"""Bits by kind, global name and offsets."""


class RandomCasts(TorchDispatchMode):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Round the input of a cast at random, so that the cast itself is exact."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and _narrows(args[1].dtype, args[0].dtype):
            return func(args[0], self.rounded(args[1]), *args[2:], **kwargs)
        if func is torch.ops.aten._to_copy.default and _narrows(args[0].dtype, kwargs.get("dtype")):
            return func(self.rounded(args[0]), **kwargs)
        return func(*args, **kwargs)

    def rounded(self, x: Tensor) -> Tensor:
        """float32 that bfloat16 has, up or down with the nearer the likelier; as many draws as entries."""
        noise = torch.randint(0, 1 << 16, x.shape, generator=self.generator, dtype=torch.int32)
        bits = (x.contiguous().view(torch.int32) + noise) & torch.tensor(-0x10000, dtype=torch.int32)
        return torch.where(x.isfinite(), bits.view(torch.float32), x)


def _narrows(source: torch.dtype, to: torch.dtype | None) -> bool:
    return source == torch.float32 and to == torch.bfloat16


class CpuNeuronKernels(NeuronKernels):
    """Trainium's kernels with the hardware's rounding on, on CPU."""

    def __init__(self) -> None:
        self._bitcasts = {dtype: _view_as(dtype) for dtype in (torch.int32, torch.float32)}
        self.rounds, self.flash, self.lnc = True, None, 1

    def recompute(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return PlainKernels.recompute(self, function, *inputs)


def _view_as(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    def view(x: Tensor) -> Tensor:
        return x.view(dtype)

    return view


@contextmanager
def mutant(name: str) -> Iterator[None]:
    """The product with one rule broken: `unshared` rounds all in hardware, `ranked` has a key for each rank.

    `apart` lets each tensor parallel rank keep its own gradient of a norm weight.
    """
    kept = Layout.is_shared, grads._TensorParallelMeans.__call__

    def ranked(layout: Layout, shards: Any, kind: str, seed: int, put: Any) -> Any:
        return rounding_keys(layout, shards, kind, seed + layout.mesh.rank, put)

    if name == "unshared":
        Layout.is_shared = lambda *_: False  # type: ignore[method-assign]
    elif name == "ranked":
        adamw.rounding_keys = ranked  # type: ignore[attr-defined]
    elif name == "apart":
        grads._TensorParallelMeans.__call__ = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Layout.is_shared, grads._TensorParallelMeans.__call__ = kept  # type: ignore[method-assign]
        adamw.rounding_keys = rounding_keys  # type: ignore[attr-defined]


def trained(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], steps: int, seeds: Sequence[int], broken: str
) -> tuple[Entries, list[str]]:
    """Tensors of this rank after some steps on such hardware, and the vote's finding on its copies.

    Args:
        broken: See `mutant`; empty for the product as it is.
    """
    backend.kernels = CpuNeuronKernels()
    with mutant(broken):
        state = start(backend, resolved, weights)
        with RandomCasts(seeds[backend.rank]):
            for batch in batches(resolved, steps):
                train_step(state, local_batch(state, batch, resolved.config.train.micro_batch), LR)
    vote = ReplicaCheck(state)
    of_all, _ = vote.gather()
    return entries(state), [str(result) for result in vote.mismatches(of_all)]


def entries(state: TrainState) -> Entries:
    """The bits of parameters and optimizer state, by where they belong in the model."""
    whole = Layout(state.table, replace(state.mesh, shard_size=1))
    params = {name: p.detach() for name, p in state.model.named_parameters()}
    kinds = [
        ("model", params, whole),
        *((kind, result, state.layout) for kind, result in state.optimizer.state.items()),
    ]
    bits = {2: torch.int16, 4: torch.int32}
    return {
        (kind, layout.table[name].global_name(name, block.segment), block.offsets): block.of(tensors[name])
        .contiguous()
        .view(bits[tensors[name].dtype.itemsize])
        for kind, tensors, layout in kinds
        for name, blocks in layout.items()
        for block in blocks
    }


STEPS = 3
OWN, SAME = range(1, 9), [7] * 8
"""Seeds of the hardware by rank: the worst that it may do, and what `nxtrain launch` asks for."""

TIED = "model.embed_tokens.weight"


def plan(state: str = "bf16", config: dict[str, Any] | None = None, **cuts: Any) -> Resolved:
    """A bf16 run with tied embeddings and rounding at random, through two stages if not said otherwise."""
    cuts = {"pp": 2, "micro": 1, "config": {"num_hidden_layers": 2, **(config or {})}, **cuts}
    return changed(layout("tied", params="bf16", update="bf16_stochastic", **cuts), precision={"state": state})


def run(ranks: RankPool, resolved: Resolved, seeds: Sequence[int], mutant: str = "") -> list[tuple[Entries, list[str]]]:
    """Tensors of each rank at the end, and the vote's finding there."""
    parallel = resolved.config.parallel
    world = parallel.tp * parallel.pp * parallel.dp
    result: list[tuple[Entries, list[str]]] = ranks.run(
        world, trained, resolved, weights_of(resolved), STEPS, seeds, mutant
    )
    return result


def unequal(result: Sequence[tuple[Entries, list[str]]]) -> dict[str, float]:
    """The share of entries that are not the same on two ranks that hold them, by global name, the largest first."""
    first: Entries = {}
    shares: dict[str, float] = {}
    num_compared = 0
    for entries, _ in result:
        for location, tensor in entries.items():
            if location in first:
                num_compared += 1
                share = (first[location] != tensor).float().mean().item()
                shares[location[1]] = max(shares.get(location[1], 0.0), share)
            first.setdefault(location, tensor)
    assert num_compared, "nothing was held twice"
    return {name: share for name, share in shares.items() if share}


@pytest.mark.parametrize(
    "cuts",
    [
        {"tp": 1},
        {"tp": 1, "state": "fp32"},
        {"tp": 2, "sp": True},
        {"tp": 2},
        {"tp": 2, "config": {"num_key_value_heads": 1}},
        {"tp": 2, "sp": True, "config": {"num_key_value_heads": 1}, "fused_qkv": False},
        {"tp": 1, "dp": 2, "shard": "zero1"},
        {"tp": 2, "pp": 1, "dp": 2, "sp": True, "shard": "zero1", "config": {"num_key_value_heads": 1}},
    ],
    ids=["pp2", "pp2-fp32-state", "tp2-sp", "tp2", "kv-copies", "kv-copies-unfused", "zero1", "tp2-zero1"],
)
def test_what_ranks_hold_alike_stays_equal_whatever_each_of_them_draws(ranks: RankPool, cuts: dict[str, Any]) -> None:
    """Parameters and the optimizer's state, in every direction of the mesh; and the vote sees the same."""
    result = run(ranks, plan(**cuts), OWN)
    assert unequal(result) == {}
    assert [said for _, said in result] == [[]] * len(result)


def test_replicas_that_update_everything_differ_in_what_one_rank_of_a_copy_has_alone(ranks: RankPool) -> None:
    """With shard=none they rely on equal streams of the hardware; the vote names all that differs without them."""
    resolved = plan(tp=1, dp=2)
    result = run(ranks, resolved, OWN)
    differing = unequal(result)
    assert TIED not in differing
    assert {"model.norm.weight", "model.layers.0.mlp.down_proj.weight"} <= differing.keys()
    assert all(said and said[0].startswith("ranks") for _, said in result)
    assert not any(TIED in text for _, said in result for text in said)
    assert unequal(run(ranks, resolved, SAME)) == {}


def test_tied_copies_drift_if_the_hardware_rounds_them_even_from_one_seed(ranks: RankPool) -> None:
    """Two stages draw different numbers of bits. The vote names the copies."""
    result = run(ranks, plan(tp=1), SAME, "unshared")
    assert unequal(result)[TIED] > 0.5
    for _, said in result:
        assert said == [f"ranks 0 and 1 differ in {TIED} and 2 more tensors, and no majority tells which is right"]


@pytest.mark.parametrize(
    ("mutant", "cuts", "drifts"),
    [
        ("ranked", {"tp": 1}, {TIED}),
        ("unshared", {"tp": 2, "pp": 1, "sp": True}, {"model.norm.weight"}),
        ("apart", {"tp": 2, "pp": 1}, {"model.norm.weight"}),
        (
            "unshared",
            {"tp": 2, "pp": 1, "sp": True, "config": {"num_key_value_heads": 1}},
            {"model.norm.weight", "model.layers.0.self_attn.k_proj.weight"},
        ),
    ],
)
def test_a_broken_rule_is_seen_by_comparison_and_by_vote(
    ranks: RankPool, mutant: str, cuts: dict[str, Any], drifts: set[str]
) -> None:
    result = run(ranks, plan(**cuts), OWN, mutant)
    differing = unequal(result)
    assert drifts <= differing.keys()
    assert "model.layers.0.mlp.down_proj.weight" not in differing
    assert all(said for _, said in result)


def test_emulated_casts_round_up_and_down_with_the_right_mean() -> None:

    x = torch.full((20_000,), 1.0 + 2.0**-9)  # a quarter of the way to the next number of bfloat16
    with RandomCasts(0):
        cast, copied = x.to(torch.bfloat16), torch.empty(len(x), dtype=torch.bfloat16)
        copied.copy_(x)
        exact = torch.tensor([1.0, float("inf"), -3.5]).to(torch.bfloat16)
    for result in (cast, copied):
        assert set(result.tolist()) == {1.0, 1.0 + 2.0**-7}
        assert result.float().mean().item() == pytest.approx(1.0 + 2.0**-9, abs=1e-4)
    assert not torch.equal(cast, copied)
    assert exact.tolist() == [1.0, float("inf"), -3.5]
