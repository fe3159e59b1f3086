"""Training in the order of ranks of a trn2 whose tensor parallelism takes half a node, as NeuronX Distributed has it.

Its own rule for that order asks for 64 ranks. Here it is applied to four, which stand for the four rows of chips:
tensor parallelism goes over the outer two rows and over the inner two.

`tests/support/nxd_cpu.py` says how to run these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from unittest.mock import patch

import pytest
from torch import Tensor

from nxtrain.backends.base import Backend
from nxtrain.common.errors import BackendError
from nxtrain.config.check import Resolved
from tests.support.models import weights_of
from tests.support.parity import Course, check_course, layout, reference, run_ours, start
from tests.support.ranks import RankPool

pytestmark = pytest.mark.nxd

ORDER = (0, 3, 1, 2)
STEPS = 5


@contextmanager
def rows() -> Iterator[None]:
    """Let NxD lay out four ranks as the rows of a trn2."""
    from neuronx_distributed.parallel_layers import parallel_state

    with patch.object(parallel_state, "get_logic_chosen", lambda *_, **__: parallel_state.PG_Group_Logic.LOGIC2):
        yield


def run(
    backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor], mutant: bool = False
) -> tuple[tuple[int, ...], list[list[int]], Course]:
    """The order of ranks, the groups over which NxD would sum gradients, and what was trained."""
    from neuronx_distributed.parallel_layers.parallel_state import get_expert_data_parallel_replica_groups

    from nxtrain.backends.neuron.nxd import groups

    sound = groups.sums_over_dp
    with rows(), patch.object(groups, "sums_over_dp", lambda mesh: mutant or sound(mesh)):
        order = backend.binding.rank_order(tp=2, pp=1)
        course = run_ours(backend, resolved, STEPS, weights)
        return order, get_expert_data_parallel_replica_groups(), course


@pytest.mark.parametrize("shape", ["gqa2", "mqa"])  # mqa: each K/V head on ranks 0 and 3, and on 1 and 2
def test_gradients_are_averaged_over_the_ranks_that_hold_the_same_shard(nxd_ranks: RankPool, shape: str) -> None:
    resolved = layout(shape, tp=2, dp=2, sp=True, micro=2)
    result = nxd_ranks.run(4, run, resolved, weights_of(resolved))
    assert {order for order, _, _ in result} == {ORDER}
    check_course([result[rank][2] for rank in ORDER], reference(resolved, STEPS), resolved)


def test_nxd_itself_would_sum_those_of_different_shards(nxd_ranks: RankPool) -> None:
    resolved = layout("gqa2", tp=2, dp=2, sp=True, micro=2)
    result = nxd_ranks.run(4, run, resolved, weights_of(resolved), True)
    assert all({tuple(sorted(group)) for group in groups} == {(0, 2), (1, 3)} for _, groups, _ in result)
    with pytest.raises(AssertionError):
        check_course([result[rank][2] for rank in ORDER], reference(resolved, STEPS), resolved)


def refusal(backend: Backend, resolved: Resolved, weights: Mapping[str, Tensor]) -> str:
    with rows(), pytest.raises(BackendError) as refused:
        start(backend, resolved, weights)
    return str(refused.value)


def test_gloo_which_counts_ranks_ascending_refuses_to_cut_state_over_them(nxd_ranks: RankPool) -> None:
    resolved = layout("gqa2", tp=2, dp=2, micro=2, shard="zero1")
    for said in nxd_ranks.run(4, refusal, resolved, weights_of(resolved)):
        assert said.startswith("gloo needs groups of ascending ranks, but NxD's shard group is (3, 2); use another")
