"""Ranks that do not come to the rendezvous are named, with their nodes."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from nxtrain.common.distributed import rendezvous
from nxtrain.common.process.placement import Placement
from nxtrain.common.text import SHOWN

LIMIT = timedelta(seconds=0.2)


def refusals(world: int, present: list[int]) -> list[str]:
    """Reasons with which the ranks that are there refuse to start."""
    store = HashStore()
    store.set_timeout(LIMIT)
    with ThreadPoolExecutor(len(present)) as pool:
        return list(pool.map(lambda rank: rendezvous._refusal(store, rank, world, LIMIT), present))


@pytest.mark.parametrize(
    ("local_world", "present", "said"),
    [
        (
            1,
            [0, 1],
            "1 of 3 ranks",
        ),
        (3, [0, 1], "1 of 3 ranks"),
        (1, [0], "2 of 3 ranks"),
    ],
)
def test_a_rank_that_does_not_come_is_named_with_its_node(
    monkeypatch: pytest.MonkeyPatch, local_world: int, present: list[int], said: str
) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": local_world}.items():
        monkeypatch.setenv(name, str(value))
    absent = [rank for rank in range(3) if rank not in present]
    named = ", ".join(map(str, absent))
    nodes = f" on node{'s' * (len(absent) > 1)} {named}" if local_world == 1 else ""
    for text in refusals(3, present):
        assert text.startswith(
            f"{said} did not come within recovery.hang_timeout_s=0.2 seconds: {named}{nodes}. See the logs of"
        )


def test_ranks_that_all_come_refuse_nothing() -> None:
    assert refusals(3, [0, 1, 2]) == [""] * 3


@given(st.integers(1, 8), st.integers(1, 40), st.data())
def test_nodes_are_those_of_a_count_machine_by_machine(local_world: int, nodes: int, data: st.DataObject) -> None:
    ranks = data.draw(st.lists(st.integers(0, local_world * nodes - 1), min_size=1))
    machines: Mapping[int, int] = dict(enumerate(node for node in range(nodes) for _ in range(local_world)))
    named = sorted({machines[rank] for rank in ranks})
    words = Placement(world=local_world * nodes, local_world=local_world).on_nodes(ranks)
    if nodes == 1:
        assert words == ""
    elif len(named) <= SHOWN:
        assert words.replace(" on nodes ", "").replace(" on node ", "") == ", ".join(map(str, named))
    else:
        assert words.endswith(f"{named[SHOWN - 1]} and {len(named) - SHOWN} more")
