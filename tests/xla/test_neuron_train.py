"""`nxtrain compile` and `nxtrain train` on one core of a pretended Trainium machine, held against transformers.

The backend, its kernels and its graphs are the product's; what is pretended, `tests.support.neuron_machine` lists.
Among that is the hardware's stochastic rounding, in whose place XLA:CPU rounds to the nearest number. A Trainium would
add its random bits, and its own arithmetic.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import changed
from tests.support.neuron_machine import LINK, NXD, assert_real, witnesses
from tests.support.neuron_runs import RESUMED, Machine
from tests.support.parity import check_scalars, layout, narrow_reference, reference

STEPS, SAVED = 6, 3
PLAN = layout("odd", tp=1, micro=2, config={"num_attention_heads": 4, "num_key_value_heads": 2})


def test_what_was_compiled_beforehand_trains_as_transformers_does_and_resumes(tmp_path: Path) -> None:
    machine = Machine.furnished(tmp_path, PLAN, STEPS)
    machine.compile()
    printed = machine.train("compile.on_miss=stop")
    want = reference(PLAN, STEPS)
    check_scalars(machine.column("loss"), machine.column("grad_norm"), want)
    printed += machine.resume(SAVED, "compile.on_miss=stop")
    assert machine.records(RESUMED) == machine.records()[SAVED:]
    assert "Call compiler" not in printed
    assert_real(tmp_path, processes=3)
    assert not any(each["rounds"] for each in witnesses(tmp_path))


def test_bf16_that_the_hardware_rounds_stays_as_near_to_fp32_as_transformers_in_bf16(tmp_path: Path) -> None:
    machine = Machine.furnished(tmp_path, PLAN, STEPS)
    rule = ("precision.params=bf16", "precision.update=bf16_stochastic")
    machine.train(*rule)
    losses = machine.column("loss")
    exact, theirs = (course.losses for course in (reference(PLAN, STEPS), narrow_reference(PLAN, STEPS, masters=False)))
    errors = [max(abs(a - b) for a, b in zip(found, exact, strict=True)) for found in (losses, theirs)]
    assert 0.0 < errors[0] < 1.5 * errors[1], (errors, losses, theirs, exact)

    machine.resume(SAVED, *rule)
    # On hardware the steps after a resume draw other bits; a plain cast draws none.
    assert machine.records(RESUMED) == machine.records()[SAVED:]
    assert_real(tmp_path, processes=2)
    assert all(each["rounds"] is True for each in witnesses(tmp_path))


def test_two_ranks_whose_hosts_carry_their_collectives_train_as_transformers_does(tmp_path: Path) -> None:
    plan = layout("gqa2", tp=1, micro=1)
    machine = Machine.furnished(tmp_path, plan, 4)
    overrides = (
        "parallel.tp=1",
        "parallel.dp=2",
        "parallel.shard=zero1",
        "train.steps=4",
        "compile.max_recompiles=100",
    )
    machine.train(*overrides, "checkpoint.every=0", world=2, **{LINK: "1"})
    want = reference(plan, 4)
    check_scalars(machine.column("loss"), machine.column("grad_norm"), want)
    assert_real(tmp_path, processes=2)


@pytest.mark.nxd
def test_nxds_layers_and_flash_attention_train_as_near_to_fp32_as_transformers_in_bf16(tmp_path: Path) -> None:
    """With the kernels' device code alone replaced; `tests/support/nxd_cpu.py` says how to run it."""
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "intermediate_size": 90}
    plan = changed(
        layout("mha", tp=1, batch=2, micro=1, config={**shape, "max_position_embeddings": 2048}),
        train={"seq_len": 2048},
    )
    machine = Machine.furnished(tmp_path, plan, 3)
    overrides = ("backend.layers=nxd", "backend.attention=flash", "precision.params=bf16", "checkpoint.every=0")
    printed = machine.nxtrain("train", *overrides, "precision.update=fp32_master", **{NXD: "1"})
    assert "layers nxd: neuronx-distributed" in printed
    exact, theirs = reference(plan, 3).losses, narrow_reference(plan, 3, masters=True).losses
    errors = [max(abs(a - b) for a, b in zip(found, exact, strict=True)) for found in (machine.column("loss"), theirs)]
    assert 0.0 < errors[0] < 1.5 * errors[1], (errors, machine.column("loss"), theirs, exact)
    assert_real(tmp_path, processes=1)
    (note,) = witnesses(tmp_path)[0]["notes"]
    assert note.startswith("flash attention: NKI's kernel of neuronx-distributed 0.")
