"""Rules of units of sharded parameters, and of state in host memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.test_check import checked, only


@pytest.mark.parametrize(
    "key",
    ["unit_params=9", "prefetch=2", "forward_prefetch=false", "backward_prefetch=after", "backward_prefetch=none"],
)
def test_units_are_of_sharded_parameters(tmp_path: Path, key: str) -> None:
    result = only(tmp_path, "parallel.shard=zero1", f"parallel.{key}")
    assert result.key == f"parallel.{key.partition('=')[0]}" and "use parallel.shard=grad_op" in result.hint
    checked(tmp_path, "parallel.shard=full", f"parallel.{key}")


def test_nothing_is_gathered_after_the_gradients_if_no_unit_is_gathered_ahead(tmp_path: Path) -> None:
    overrides = ("parallel.shard=full", "parallel.prefetch=0")
    assert only(tmp_path, *overrides, "parallel.backward_prefetch=after").key == "parallel.backward_prefetch"
    checked(tmp_path, *overrides, "parallel.backward_prefetch=none")


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ("true", ("params", "optimizer")),
        ("false", ()),
        ('["activations"]', ("activations",)),
        ('["optimizer","activations"]', ("optimizer", "activations")),
    ],
)
def test_offload_names_kinds_of_state_and_true_means_two_of_them(
    tmp_path: Path, given: str, kinds: tuple[str, ...]
) -> None:
    result = checked(
        tmp_path, "parallel.shard=full", "parallel.dp=2", "train.global_batch=2", f"parallel.offload={given}"
    )
    assert result.config.parallel.offload == kinds


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("parallel.shard=none", 'parallel.offload=["params"]'), "shard=none does not shard them"),
        (('parallel.offload=["optimizer", "optimizer"]',), "names a kind twice"),
        (('parallel.offload=["optimizer"]', "backend.name=xla"), "runs on cpu and cuda, not on xla"),
        (('parallel.offload=["activations"]', "backend.name=neuron-native"), "not on neuron-native"),
        (
            ('parallel.offload=["params"]', "parallel.shard=full", "parallel.dp=2", "compile.torch_compile=step"),
            "between graphs",
        ),
        (
            ('parallel.offload=["activations"]', "compile.torch_compile=true", "backend.name=cpu"),
            "activations that autograd saves",
        ),
        (('parallel.offload=["weights"]',), "is not one of params, optimizer, activations"),
        (("parallel.offload=1",), "is an integer, but a list is needed"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(tmp_path: Path, overrides: tuple[str, ...], reason: str) -> None:
    result = only(tmp_path, *overrides)
    assert result.key == "parallel.offload" and reason in result.reason


@pytest.mark.parametrize("kind", ["optimizer", "activations"])
def test_what_is_not_sharded_can_be_offloaded_in_every_mode(tmp_path: Path, kind: str) -> None:
    for shard in ("none", "zero1", "full"):
        checked(tmp_path, f"parallel.shard={shard}", f'parallel.offload=["{kind}"]')
