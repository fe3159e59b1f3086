"""A rank of a GPU that does not get on: nxtrain names it before NCCL ends the process, by what NCCL has queued."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.common.errors import HangError
from tests.support.command_ranks import Ranks, write_config
from tests.support.commands import context

pytestmark = pytest.mark.cuda

PATIENCE_S = 15.0
"""Above the time in which NCCL makes its communicators."""


@pytest.mark.usefixtures("has_two_gpus")
@pytest.mark.parametrize(("kind", "words"), [("hang", "rank 1 is in"), ("stop", "and gives no sign of life")])
def test_a_rank_that_does_not_get_on_is_named_before_the_limit_of_nccl(tmp_path: Path, kind: str, words: str) -> None:
    write_config(tmp_path, backend={"name": "cuda"}, recovery={"hang_timeout_s": PATIENCE_S})
    with Ranks(context(), tmp_path, f"{kind}@1:9:data") as ranks:
        codes = ranks.ended(0, within_s=20 * PATIENCE_S)
    assert codes == {0: HangError.exit_code}, ranks.said()
    said = ranks.said()[0]
    assert f"rank 1 did not come within recovery.hang_timeout_s={PATIENCE_S:g} seconds" in said
    assert words in said
    assert "all ranks wait for each other" not in said
    assert (tmp_path / "run/logs/hang-rank-0-nccl.pickle").stat().st_size > 0
