"""No graph of a long sequence's attention has a tensor with two dimensions of a sequence, on PyTorch/XLA."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nxtrain.backends.limits import LONGEST_SCORES
from tests.support.xla_bodies import attention_graphs
from tests.support.xla_engine import run_devices

LENGTH = 2 * LONGEST_SCORES


def squares(text: str, length: int) -> list[str]:
    """Shapes of a graph with two dimensions of a length or more."""
    shapes = set(re.findall(r"\[([\d,]+)\]", text))
    return sorted(shape for shape in shapes if sum(int(size) >= length for size in shape.split(",")) > 1)


@pytest.mark.parametrize("length", [LENGTH, LONGEST_SCORES])
def test_no_tensor_of_a_graph_has_two_dimensions_of_a_sequence(length: int, tmp_path: Path) -> None:
    (texts,) = run_devices(1, attention_graphs, length, 1, folder=tmp_path)
    assert len(texts) == 8
    for label, text in texts.items():
        # Scores of a short sequence are computed at once, which shows that such a tensor is noticed.
        at_once = length == LONGEST_SCORES and label.endswith("documents False, cp 1")
        of_rank = length // 2 if length == LENGTH and label.endswith("cp 2") else length
        assert bool(squares(text, of_rank)) == at_once, (label, squares(text, of_rank))
        assert (" all-gather(" in text and " reduce-scatter(" in text) == label.endswith("cp 2")


def test_ranks_record_equal_graphs(tmp_path: Path) -> None:
    both = [run_devices(1, attention_graphs, 2 * 512, rank, folder=tmp_path)[0] for rank in (0, 1)]
    assert both[0] == both[1]
