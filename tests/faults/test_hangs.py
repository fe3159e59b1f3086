"""A rank that does not get on is named within two seconds of the limit, with the stacks of all ranks."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch.distributed as dist

from nxtrain.common.errors import HangError
from nxtrain.common.run_folder import LOGS_DIR
from nxtrain.config.load import load
from nxtrain.launch.debug import debug_variables
from nxtrain.metrics.start_log import read
from tests.support.command_ranks import WORLD, Ranks, until, write_config
from tests.support.runs import course

PATIENCE_S = 3.0
LATE_S = 2.0
"""Within which all ranks that can have told who hangs."""


def hung(started_by: ForkServerContext, folder: Path, kind: str, survivors: list[int]) -> tuple[Ranks, float]:
    """Ranks of which the second hangs, and the seconds until the survivors had ended."""
    write_config(folder, recovery={"hang_timeout_s": PATIENCE_S})
    with Ranks(started_by, folder, f"{kind}@1:9:data") as ranks:
        codes = ranks.ended(*survivors)
        (fired,) = (folder / "run/faults").iterdir()
        after_s = time.time() - fired.stat().st_mtime
        assert set(codes.values()) == {HangError.exit_code}, ranks.said()
        if kind == "gil":
            assert ranks.ended(1) == {1: HangError.exit_code}, "the system's timer ends it; nothing of Python can"
    return ranks, after_s


@pytest.mark.alone
def test_a_rank_that_sleeps_in_data_is_named_by_all(started_by: ForkServerContext, tmp_path: Path) -> None:
    ranks, after_s = hung(started_by, tmp_path, "hang", [0, 1])
    assert PATIENCE_S - 0.5 < after_s < PATIENCE_S + LATE_S
    verdicts = set()
    for rank, said in ranks.said().items():
        assert said.count("error: ") == 1, said
        error = said[said.index("error: ") :]
        verdicts.add(error.removeprefix(f"error: rank {rank}: "))
        assert "Traceback" not in said
        stacks = (tmp_path / "run" / "logs" / f"hang-rank-{rank}.txt").read_text(encoding="utf-8")
        # Rank 0 waits in a collective, whose own time may come to its end a little sooner.
        places = ["loader.py"] if rank else ["shared_memory.py", "in await_verdict"]
        assert any(frame in stacks for frame in places), stacks
        assert any(frame in said for frame in places), "stacks are on standard error too"
    (verdict,) = verdicts
    assert verdict.startswith(
        f"rank 1 did not come within recovery.hang_timeout_s={PATIENCE_S:g} seconds: rank 1 is in"
    )
    assert "(data)" in verdict
    assert "in prefetched" in verdict


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["stop", "gil"])
def test_a_rank_that_cannot_answer_is_named_by_the_other(
    started_by: ForkServerContext, tmp_path: Path, kind: str
) -> None:
    ranks, after_s = hung(started_by, tmp_path, kind, [0])
    assert after_s < PATIENCE_S + LATE_S
    said = ranks.said()[0]
    assert f"error: rank 0: rank 1 did not come within recovery.hang_timeout_s={PATIENCE_S:g} seconds and gives" in said
    assert "rank 1 was last in step" in said
    if kind == "gil":
        assert "in _hang" in ranks.said()[1]


def as_launched_alone_on_a_node(config: Path) -> None:
    """The rank's machine has no other, and its environment is the launcher's."""
    variables = debug_variables(load(config, ()).config, {}, neuron=False)
    os.environ.update({variable.name: variable.value for variable in variables})
    os.environ.update({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    dist.set_debug_level_from_env()  # torch read the environment as these processes imported it
    assert (dist.get_debug_level() == dist.DebugLevel.DETAIL) == bool(variables)


def absent_from_a_checkpoint(started_by: ForkServerContext, folder: Path, debug: str) -> Path:
    """The folder of a run of three nodes, the last of which does not come to the first checkpoint."""
    config = write_config(
        folder,
        every=3,
        parallel={"dp": 3},
        train={"steps": 9, "global_batch": 3},
        backend={"cpu_transport": "gloo"},
        recovery={"hang_timeout_s": PATIENCE_S, "debug": debug},
    )
    first = partial(as_launched_alone_on_a_node, config)
    with Ranks(started_by, folder, "hang@2:3:ckpt_stage", world=3, first=first) as ranks:
        codes = ranks.ended()
    said = ranks.said()
    assert set(codes.values()) == {HangError.exit_code}, said
    limit = f"did not come within recovery.hang_timeout_s={PATIENCE_S:g} seconds"
    verdict = f"rank 2 on node 2 {limit}: rank 2 is in step 3 (checkpoint)"
    for rank in range(3):
        assert said[rank].count("error: ") == 1, said[rank]
        assert f"error: rank {rank}: {verdict}" in said[rank], said[rank]
    assert ("recovery.debug=dist: " in said[0]) == (debug == "dist")
    assert read(folder / "run" / LOGS_DIR)[-1].why.startswith(verdict)
    return folder / "run"


@pytest.mark.alone
def test_one_of_three_that_does_not_come_to_a_checkpoint_is_named_with_its_node(
    started_by: ForkServerContext, tmp_path: Path
) -> None:
    """Under `recovery.debug=dist` too, where a barrier of torch's own is before each collective; no number changes."""
    plain, debugged = (absent_from_a_checkpoint(started_by, tmp_path / name, name) for name in ("off", "dist"))
    assert course(plain) == course(debugged)
    assert [record["step"] for record in course(plain)] == [1, 2, 3]


def test_stacks_are_to_be_had_on_request(started_by: ForkServerContext, tmp_path: Path) -> None:
    write_config(tmp_path)
    with Ranks(started_by, tmp_path) as ranks:
        ranks.await_steps(2)
        ranks.send(signal.SIGUSR2, *range(WORLD))
        until(lambda: all("most recent call first" in said for said in ranks.said().values()), 60.0, ranks.said)
        assert all(process.is_alive() for process in ranks.processes)
