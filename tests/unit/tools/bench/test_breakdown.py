"""Kinds of operations by name and place."""

from __future__ import annotations

import pytest

from nxtrain.tools.bench.breakdown import (
    ATTENTION,
    COMMUNICATION,
    COPIES,
    DISPATCH,
    ELEMENTWISE,
    LOSS,
    MATMUL,
    OPTIMIZER,
    OUTSIDE,
    STEP,
    UPDATE,
    WAIT,
    WAITING,
    kind_of,
)


@pytest.mark.parametrize(
    ("chain", "kind"),
    [
        (("aten::mm", "aten::matmul", STEP), MATMUL),
        (("aten::mm", "_VocabCrossEntropyBackward", STEP), MATMUL),
        (("aten::addmm", STEP), MATMUL),
        (("aten::bmm", "CompiledFunction", STEP), ATTENTION),
        (("aten::mm", "_BlockedAttention", STEP), ATTENTION),
        (("aten::_scaled_dot_product_flash_attention_for_cpu", STEP), ATTENTION),
        (("aten::copy_", "aten::to", STEP), COPIES),
        (("aten::copy_", "_VocabCrossEntropy", STEP), LOSS),
        (("aten::copy_", UPDATE, STEP), OPTIMIZER),
        (("aten::_fused_adamw_", UPDATE, STEP), OPTIMIZER),
        (("c10d::allreduce_", UPDATE, STEP), COMMUNICATION),
        (("aten::mul", STEP), ELEMENTWISE),
        (("aten::sum", STEP), ELEMENTWISE),
        (("## Call CompiledFxGraph abc ##", STEP), ELEMENTWISE),
        (("aten::view", STEP), DISPATCH),
        (("aten::empty_strided", STEP), DISPATCH),
        (("_RMSNorm", STEP), DISPATCH),
        (("autograd::engine::evaluate_function: MmBackward0", STEP), DISPATCH),
        ((WAIT, UPDATE, STEP), WAITING),
        ((STEP,), OUTSIDE),
    ],
)
def test_an_operation_has_the_kind_of_its_name_or_of_its_place(chain: tuple[str, ...], kind: str) -> None:
    assert kind_of(chain) == kind
