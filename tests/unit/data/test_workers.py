"""Workers make the rows that their rank would make, whatever their number, and whatever ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from nxtrain.common.errors import DataError, WorkerError
from nxtrain.data import workers as data_workers
from nxtrain.data.arrow import streams
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.streams import CorpusLanes
from nxtrain.data.loader import Batch, BatchShare
from nxtrain.data.stream_loader import (
    LaneOrder,
    LanePosition,
    LaneRows,
    LocalLanes,
    StreamLoader,
    merged,
    num_lanes,
    positions_of,
)
from nxtrain.data.tokenization import load_tokenizer
from nxtrain.data.workers import AHEAD, WorkerPolicy, Workers
from tests.support.corpora import NumberedLanes, documents, prepare, write_corpus, write_tokenizer

SEQ_LEN, GLOBAL_BATCH, SEED, VOCABULARY = 24, 8, 7, 300
ORDER = LaneOrder(num_lanes(GLOBAL_BATCH), SEED, True)
IN_TIME_S = 20.0
THREE_EPOCHS = 40
"""Steps in which every lane of the corpus has begun its fourth epoch."""
GRID = [(dp, workers) for workers in (0, 2, 4) for dp in (2, 1, 4)]
"""Data parallel ranks, and workers of each."""
Taken = tuple[list[Batch], list[dict[int, LanePosition]]]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CorpusLanes:
    folder = tmp_path_factory.mktemp("corpus")
    prepare(write_corpus(folder / "src", "a.jsonl", documents(40)), out=folder / "o.arrow")
    tokenizer = load_tokenizer(write_tokenizer(folder / "tokenizer", VOCABULARY), VOCABULARY)
    identity = PreparedCorpus(folder / "o.arrow").identity
    options = (tokenizer.path, tokenizer.end, VOCABULARY, 0.1)
    return CorpusLanes((folder / "o.arrow",), (identity,), None, *options, packing="concat", seq_len=SEQ_LEN)


def policy(number: int = 2, restarts: int = 3, timeout_s: float = IN_TIME_S) -> WorkerPolicy:
    return WorkerPolicy(number, restarts, timeout_s, rank=6)


def taken(
    source: CorpusLanes, workers: int, dp: tuple[int, int], steps: int, positions: Sequence[LanePosition] = ()
) -> Taken:
    """Batches of a rank from some positions on, and the cursor behind each."""
    local = partial(LocalLanes, partial(source.opened(), ORDER))
    item = StreamLoader(
        partial(Workers, source, ORDER, policy(workers)) if workers else local,
        ORDER.lanes,
        BatchShare(GLOBAL_BATCH, 1, *dp),
        end_id=0,
        doc_mask=True,
        positions=positions,
    )
    batches = item.prefetched(0)
    try:
        result = [(batch, item.cursor()) for batch in islice(batches, steps)]
    finally:
        batches.close()
    return [batch for batch, _ in result], [cursor for _, cursor in result]


def joined(batches: Sequence[Batch]) -> tuple[list[list[int]], ...]:
    """Inputs, targets and starts of the rows of all ranks."""
    names = ("inputs", "targets", "starts")
    result = ([vars(batch)[name].reshape(-1, SEQ_LEN) for batch in batches] for name in names)
    return tuple(np.concatenate(item).tolist() for item in result)


@pytest.mark.parametrize(("packing", "dp", "workers"), [("concat", 1, 4), ("best_fit", 2, 2), ("concat", 4, 2)])
def test_order_and_bits_depend_neither_on_workers_nor_on_ranks(
    corpus: CorpusLanes, packing: Literal["concat", "best_fit"], dp: int, workers: int
) -> None:
    source = CorpusLanes(**{**vars(corpus), "packing": packing})
    alone, cursors = taken(source, 0, (0, 1), 9)
    ranks = [taken(source, workers, (rank, dp), 9) for rank in range(dp)]
    for step, batch in enumerate(alone):
        ours = [batches[step] for batches, _ in ranks]
        for name in ("inputs", "targets", "starts"):
            assert np.concatenate([vars(own)[name] for own in ours]).tolist() == vars(batch)[name].tolist()
        assert sum(own.num_tokens for own in ours) == batch.num_tokens
        assert merged([result[step] for _, result in ranks]) == merged([cursors[step]])


class LocalWorker:
    """A worker's lanes in this process: what `Workers` deals out, without a process for each."""

    def __init__(
        self, source: CorpusLanes, order: LaneOrder, positions: dict[int, LanePosition], rows_per_lane: int
    ) -> None:
        self._lanes = LocalLanes(partial(source.opened(), order), positions, rows_per_lane)

    def answer(self, timeout_s: float) -> LaneRows:
        del timeout_s
        return self._lanes.rows(0)

    def stop(self) -> None:
        """End nothing."""

    close = stop


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_three_epochs_have_one_order_for_every_number_of_ranks_and_workers(
    corpus: CorpusLanes, packing: Literal["concat", "best_fit"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From every step on, with the ranks and workers of the next place of the grid, each row exactly once."""
    monkeypatch.setattr(data_workers, "DataWorker", LocalWorker)
    monkeypatch.setattr(streams, "WINDOW_ROWS", 3)
    source = CorpusLanes(**{**vars(corpus), "packing": packing})
    straight, cursors = taken(source, 0, (0, 1), THREE_EPOCHS)
    assert min(position[0] for position in cursors[-1].values()) * ORDER.lanes >= 3 * 40, (
        "each lane has had three epochs"
    )
    for dp, workers in GRID:
        ranks = [taken(source, workers, (rank, dp), THREE_EPOCHS)[0] for rank in range(dp)]
        assert [joined(batches) for batches in zip(*ranks, strict=True)] == [joined([batch]) for batch in straight]
    positions: list[LanePosition] = []
    for step, whole in enumerate(straight):
        dp, workers = GRID[step % len(GRID)]
        result = [taken(source, workers, (rank, dp), 1, positions) for rank in range(dp)]
        assert joined([batches[0] for batches, _ in result]) == joined([whole])
        positions = positions_of(merged([cursors[0] for _, cursors in result]), ORDER.lanes)
        assert positions == positions_of(merged([cursors[step]]), ORDER.lanes)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_GROUP_BYTES", 100)


@contextmanager
def working(source: NumberedLanes | CorpusLanes, **options: float) -> Iterator[Workers]:
    positions = dict.fromkeys(range(3), (0, 0))
    workers = Workers(source, LaneOrder(3, 0, True), policy(**options), positions, 2)  # type: ignore[arg-type]
    try:
        yield workers
    finally:
        workers.close()


def listed(rows: LaneRows) -> dict[int, tuple[list[list[int]], LanePosition]]:
    return {lane: (result.tolist(), position) for lane, (result, position) in rows.items()}


def wanted(step: int) -> dict[int, tuple[list[list[int]], LanePosition]]:
    return {lane: ([[1000 * lane + 2 * step + row] * 5 for row in (1, 2)], (2 * step + 2, 0)) for lane in range(3)}


def test_a_killed_worker_is_named_and_the_rows_go_on_as_they_would_have(capfd: pytest.CaptureFixture[str]) -> None:
    """Both workers, at drawn steps, several times, some of them before their first answer."""
    draw = np.random.default_rng(0)
    kills = {0: [1], **{int(step): [0, 1][: 1 + int(step) % 2] for step in draw.choice(np.arange(4, 14), 2, False)}}
    pids = set()
    with working(NumberedLanes()) as workers:
        for step in range(24):
            for number in kills.get(step, ()):
                pids.add(workers.members[number].pid)
                workers.members[number].signal(signal.SIGKILL)
            assert listed(workers.rows(step)) == wanted(step)
        assert pids.isdisjoint(worker.pid for worker in workers.members)
    printed = capfd.readouterr().err
    for pid in pids:
        assert f"of rank 6 (process {pid}) was ended by SIGKILL, before its rows of step" in printed
    assert printed.count("it was reading numbers.arrow, document ") >= len(pids) - 1
    assert printed.count("a new worker continues after the last received row") == len(pids)


def test_a_worker_that_hangs_is_replaced_in_time(capfd: pytest.CaptureFixture[str]) -> None:
    with working(NumberedLanes(), timeout_s=0.5) as workers:
        workers.rows(0)
        began = time.monotonic()
        workers.members[1].signal(signal.SIGSTOP)
        assert [listed(workers.rows(step)) for step in range(1, 8)] == [wanted(step) for step in range(1, 8)]
        assert time.monotonic() - began < IN_TIME_S
    printed = capfd.readouterr().err
    assert "data worker 1 of rank 6 (process " in printed
    assert "has not answered for 0.5 seconds" in printed
    assert printed.count("WARNING") == 1


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_document_that_ends_every_worker_ends_the_run_by_its_name(
    capfd: pytest.CaptureFixture[str], restarts: int
) -> None:
    with working(NumberedLanes(poison=4), number=1, restarts=restarts) as workers:
        for step in range(2):
            assert listed(workers.rows(step)) == wanted(step)
        rule = r"was ended by SIGSEGV, before its rows of step 3; it was reading numbers\.arrow, document 4\. "
        with pytest.raises(
            WorkerError, match=f"data worker 0 of rank 6 .*{rule}data.worker_restarts={restarts} allows"
        ):
            workers.rows(2)
    assert capfd.readouterr().err.count("WARNING") == restarts


def test_damage_is_named_with_the_worker_and_no_worker_is_replaced(
    corpus: CorpusLanes, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "o.arrow"
    path.write_bytes(corpus.paths[0].read_bytes().replace(b"document 7\n", b"documen\xff 7\n"))
    damaged = CorpusLanes(**{**vars(corpus), "paths": (path,)})
    printed = r"o\.arrow is damaged: bytes .* documents 0 to 39, are not .*\(found by data worker \d of rank 6\)"
    with working(damaged) as workers, pytest.raises(DataError, match=printed):
        for step in range(40):
            workers.rows(step)
    assert "WARNING" not in capfd.readouterr().err


RANK = """
import os, signal, sys, time
from nxtrain.data.stream_loader import LaneOrder
from nxtrain.data.workers import WorkerPolicy, Workers
from tests.support.corpora import NumberedLanes
workers = Workers(NumberedLanes(), LaneOrder(2, 0, True), WorkerPolicy(2, 3, 60.0), {0: (0, 0), 1: (0, 0)}, 1)
workers.rows(0)
workers.members[1].signal(signal.SIGSTOP)
print(*(worker.pid for worker in workers.members), flush=True)
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_workers_end_with_their_rank_though_it_is_killed_and_though_they_are_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, cwd=Path.cwd()) as rank:
        assert rank.stdout is not None
        pids = [int(pid) for pid in rank.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(alive, pids))
        rank.kill()
    limit = time.monotonic() + IN_TIME_S
    while any(map(alive, pids)):
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_a_stop_from_another_thread_ends_a_wait_and_leaves_no_process() -> None:
    with working(NumberedLanes()) as workers:
        pids = [worker.pid for worker in workers.members]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerError):
            workers.stop()
            for step in range(AHEAD + 1):
                workers.rows(step)
    assert not any(map(alive, pids))


def test_a_worker_imports_no_torch_and_heeds_no_stop_signal() -> None:
    with working(NumberedLanes(), number=1) as workers:
        workers.rows(0)
        pid = workers.members[0].pid
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            os.kill(pid, number)
        assert [listed(workers.rows(step)) for step in range(1, 9)] == [wanted(step) for step in range(1, 9)]
        assert workers.members[0].pid == pid
