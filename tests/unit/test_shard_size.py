"""Default number of data parallel ranks that `parallel.shard=hybrid` shards over: those of one node."""

from __future__ import annotations

import pytest

from nxtrain.train.build import build_mesh
from tests.support.parity import layout


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "ranks_per_node", "size"),
    [
        (1, 1, 8, 4, 4),
        (2, 1, 8, 8, 4),
        (1, 2, 8, 8, 8),  # each stage fills a node
        (4, 4, 2, 8, 2),  # so it does here, where a node has fewer ranks than tp x pp
        (1, 2, 4, 8, 4),  # both stages on one
        (1, 2, 6, 8, 2),  # four would not divide six, and six would begin within one node and end in the next
        (8, 2, 2, 8, 1),  # each copy of a stage fills a node
        (3, 1, 8, 8, 1),  # tensor parallel ranks on two nodes
    ],
)
def test_hybrid_cuts_over_as_many_ranks_of_a_stage_as_a_node_holds(
    tp: int, pp: int, dp: int, ranks_per_node: int, size: int
) -> None:
    resolved = layout("gqa", tp=tp, pp=pp, dp=dp, shard="hybrid")
    mesh = build_mesh(resolved, tp * pp * dp, 0, ranks_per_node)
    assert mesh.shard_size == size
    for group in mesh.shard.groups if size > 1 else ():
        assert len({rank // ranks_per_node for rank in group}) == 1
