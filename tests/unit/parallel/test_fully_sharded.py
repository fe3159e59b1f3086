"""Calls of `torch.distributed.fsdp`: the units, their types, the place of their shards, and those gathered ahead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from nxtrain.common.stages import units_of
from nxtrain.parallel import fully_sharded
from nxtrain.parallel.fully_sharded import Prefetch, Sharding
from nxtrain.parallel.precision import Precision

BLOCKS = 4


class Block(nn.Module):
    """A unit that remembers the units that it gathers ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.ahead: dict[str, list[Block]] = {}

    def set_modules_to_forward_prefetch(self, modules: list[Block]) -> None:
        self.ahead["forward"] = modules

    def set_modules_to_backward_prefetch(self, modules: list[Block]) -> None:
        self.ahead["backward"] = modules


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.weight = nn.Parameter(torch.zeros(2))

    @property
    def blocks(self) -> list[nn.Module]:
        return list(self.layers)


class Asked:
    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch, **how: Any) -> None:
        self.events: list[tuple[str, nn.Module]] = []
        self.options: dict[nn.Module, Mapping[str, Any]] = {}
        self.methods: list[str] = []
        self.units: list[list[nn.Module]] = []

        def shard(given: nn.Module | list[nn.Module], **options: Any) -> None:
            unit = given if isinstance(given, list) else [given]
            self.units.append(unit)
            self.events.append(("shard", unit[0]))
            self.options[unit[0]] = options

        monkeypatch.setattr(fully_sharded, "fully_shard", shard)
        monkeypatch.setattr(fully_sharded, "register_fsdp_forward_method", lambda _, name: self.methods.append(name))
        self.mesh = cast(DeviceMesh, object())
        asked = {"keep_gathered": False, "prefetch": Prefetch(), "offload": False, "unit_params": 0, "chunks": [BLOCKS]}
        sharding = Sharding(**{"mesh": self.mesh, **asked, **how})
        sharding.apply(model, lambda module: self.events.append(("fill", module)))


def precision(params: torch.dtype = torch.bfloat16, reduce: torch.dtype = torch.float32) -> Precision:
    return Precision(params, accumulate=reduce, reduce=reduce, update="fp32_master", state=torch.float32)


@pytest.mark.parametrize("has_accelerator", [False, True])
def test_offloaded_shards_are_in_host_memory_that_is_pinned_where_a_device_copies_from_it(
    monkeypatch: pytest.MonkeyPatch, has_accelerator: bool
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_accelerator)
    model = Model()
    asked = Asked(model, monkeypatch, offload=True, precision=precision())
    assert list(asked.options) == [*model.blocks, model]
    for options in asked.options.values():
        policy = options["offload_policy"]
        assert isinstance(policy, CPUOffloadPolicy) and policy.pin_memory is has_accelerator


def test_otherwise_shards_stay_where_they_are_computed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(Model(), monkeypatch, precision=precision())
    assert {type(options["offload_policy"]) for options in asked.options.values()} == {OffloadPolicy}


@pytest.mark.parametrize("params", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16], ids=str)
def test_units_compute_and_reduce_in_the_configured_types_and_keep_their_inputs(
    monkeypatch: pytest.MonkeyPatch, params: torch.dtype, reduce: torch.dtype
) -> None:
    asked = Asked(Model(), monkeypatch, precision=precision(params, reduce))
    policy = MixedPrecisionPolicy(param_dtype=params, reduce_dtype=reduce, cast_forward_inputs=False)
    for options in asked.options.values():
        assert options["mp_policy"] == policy
        assert options["mesh"] is asked.mesh


@pytest.mark.parametrize("keep", [False, True])
def test_blocks_are_filled_and_cut_one_by_one_and_what_is_outside_them_stays_whole_between_passes(
    monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    model = Model()
    asked = Asked(model, monkeypatch, keep_gathered=keep, precision=precision())
    assert asked.events == [(event, unit) for unit in (*model.blocks, model) for event in ("fill", "shard")]
    drops = [options["reshard_after_forward"] for options in asked.options.values()]
    assert drops == [not keep] * BLOCKS + [False]
    assert asked.methods == ["run", "loss", "logits"]


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12), fewest=st.integers(0, 40))
def test_units_cover_the_blocks_in_order_and_are_as_small_as_the_least_size_allows(
    sizes: list[int], fewest: int
) -> None:
    units = units_of(sizes, fewest)
    assert [index for unit in units for index in unit] == list(range(len(sizes)))
    held = [sum(sizes[index] for index in unit) for unit in units]
    assert all(size >= fewest for size in held) or len(units) == 1
    # Without its last block a unit is too small; only the last unit takes in a rest that is too small alone.
    assert all(sum(sizes[index] for index in unit[:-1]) < max(1, fewest) for unit in units[:-1])
    *_, last = units
    halves = [(sum(sizes[last[0] : cut]), sum(sizes[cut : last[-1] + 1])) for cut in last[1:]]
    assert not any(first >= fewest and rest >= fewest for first, rest in halves)


def test_no_unit_has_blocks_of_two_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    asked = Asked(model, monkeypatch, precision=precision(), unit_params=100, chunks=[1, 3])
    first, *others = model.blocks
    assert [event for event, _ in asked.events] == ["fill", "shard", "fill", "fill", "fill", "shard", "fill", "shard"]
    assert asked.units == [[first], others, [model]]
