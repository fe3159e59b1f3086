"""Feed-forwards in chunks of the sequence on PyTorch/XLA: parity with the whole, and graphs without a whole one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.backends.xla.backend import XlaKernels
from nxtrain.config.check import Resolved
from nxtrain.nn import remat
from tests.support.models import changed, weights_of
from tests.support.parity import Course, check_course, layout, reference, run_ours
from tests.support.xla_bodies import recorded
from tests.support.xla_engine import run_devices

LENGTH, NUM_CHUNKS, BLOCKS, TP = 24, 3, 2, 2
INNER = 96 // TP


def in_chunks(seq_len: int) -> Resolved:
    resolved = layout("gqa2", tp=TP, dp=1, sp=True, micro=1, batch=2, remat="selective", seq_len=seq_len)
    return changed(resolved, model={"fused_gate_up": True})


def run_in_chunks(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> Course:
    """Two steps; the devices are threads of one process."""
    remat.LONG_SEQUENCE = LENGTH // NUM_CHUNKS  # type: ignore[attr-defined]
    backend.collectives.barrier()
    return run_ours(backend, resolved, 2, weights)


def test_a_run_in_chunks_equals_transformers(tmp_path: Path) -> None:
    resolved = in_chunks(LENGTH)
    result = run_devices(TP, run_in_chunks, resolved, weights_of(resolved), folder=tmp_path)
    check_course(result, reference(resolved, 2), resolved)


def graph(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], longest: int, ordered: bool) -> str:
    """A micro-batch's graph, equal on the first and the last rank."""
    order = XlaKernels.order if ordered else mock.DEFAULT
    with mock.patch.object(remat, "LONG_SEQUENCE", longest), mock.patch.object(XlaKernels, "order", order):
        first, last = recorded(backend, resolved, weights, 64, [0, 63], "")
    assert first == last
    return first[0].text


@pytest.mark.parametrize(("longest", "ordered"), [(LENGTH, True), (8, True), (8, False)])
def test_a_graph_has_a_chunk_of_a_feed_forward_at_a_time(tmp_path: Path, longest: int, ordered: bool) -> None:
    resolved = changed(in_chunks(LENGTH), parallel={"dp": 32}, train={"global_batch": 64})
    (text,) = run_devices(1, graph, resolved, weights_of(resolved), longest, ordered, folder=tmp_path)
    shapes = set(re.findall(r"f32\[([\d,]+)\]", text))
    is_whole = longest == LENGTH
    assert (f"{LENGTH},1,{2 * INNER}" in shapes) == is_whole
    assert (f"{LENGTH // NUM_CHUNKS},1,{2 * INNER}" in shapes) != is_whole
    of_attention = BLOCKS
    of_feed_forward = BLOCKS  # the whole begins once again; chunks follow each other in both passes
    if not is_whole:
        of_feed_forward = BLOCKS * (2 * NUM_CHUNKS - 1) if ordered else 0
    assert len(re.findall(r" opt-barrier\(", text)) == of_attention + of_feed_forward
    counts = Counter(re.findall(r" (all-gather|reduce-scatter)\(", text))
    again = BLOCKS if is_whole else 0  # chunks gather once in each pass, and sum once
    assert counts == {"all-gather": 14 + again, "reduce-scatter": 10 + again}
