"""Rows that are packed while they are consumed: their order, their tokens, and their position after any step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nxtrain.common.batch_sizes import BatchSizes
from nxtrain.common.errors import CheckpointError, DataError
from nxtrain.common.vocab import END_BIT, ID_MASK, IGNORE_INDEX
from nxtrain.data import stream_loader
from nxtrain.data.arrow import streams
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.streams import BestFitLane, Documents, is_held_out, open_lane
from nxtrain.data.loader import Batch, BatchShare, Skips
from nxtrain.data.order import shuffled
from nxtrain.data.stream_loader import (
    MAX_LANES,
    Lane,
    LaneOrder,
    LanePosition,
    LocalLanes,
    StreamLoader,
    merged,
    num_lanes,
    positions_of,
)
from nxtrain.data.tokenization import TextTokenizer, load_tokenizer
from tests.support.corpora import drop_checksums, prepare, write_corpus, write_tokenizer

SEQ_LEN, GLOBAL_BATCH, SEED, VOCABULARY = 24, 8, 7, 300
IN_ORDER = LaneOrder(1, SEED, False)
Packing = Literal["concat", "best_fit"]
TEXTS = [f"{number}: " + "snow and rain " * (number * number % 11) for number in range(37)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer") / "t", VOCABULARY), VOCABULARY)


@pytest.fixture(scope="module", params=["text", "ids"])
def documents(
    request: pytest.FixtureRequest, tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Documents:
    folder = tmp_path_factory.mktemp("corpus")
    options: dict[str, Any] = {"tokenizer": tokenizer.path} if request.param == "ids" else {}
    prepare(write_corpus(folder / "src", "a.jsonl", TEXTS), out=folder / "o.arrow", **options)
    given = None if request.param == "ids" else tokenizer
    return Documents(PreparedCorpus(folder / "o.arrow"), given, VOCABULARY)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WINDOW_ROWS", 3)
    monkeypatch.setattr(streams, "_GROUP_BYTES", 100)


def ids_of(tokenizer: TextTokenizer, text: str) -> list[int]:
    return [*next(tokenizer.encode([text])).tolist(), tokenizer.end_id]


def loader(
    documents: Documents,
    packing: Packing,
    *,
    dp: tuple[int, int] = (0, 1),
    micro: int = 1,
    positions: Sequence[LanePosition] = (),
    shuffle: bool = True,
    skips: Skips = (),
    ramp: BatchSizes | None = None,
) -> StreamLoader:
    lanes = num_lanes((ramp or BatchSizes(GLOBAL_BATCH)).unit)
    return StreamLoader(
        partial(LocalLanes, partial(open_lane, documents, packing, SEQ_LEN, LaneOrder(lanes, SEED, shuffle))),
        lanes,
        BatchShare(GLOBAL_BATCH, micro, *dp, ramp=ramp),
        end_id=0,
        positions=positions,
        skips=skips,
    )


def taken(item: StreamLoader, number: int, depth: int = 2) -> list[Batch]:
    batches = item.prefetched(0, depth)
    try:
        return list(islice(batches, number))
    finally:
        batches.close()


def rows_of(batch: Batch) -> list[list[int]]:
    """Inputs and targets of each row, side by side."""
    inputs, targets = (x.reshape(-1, SEQ_LEN) for x in (batch.inputs, batch.targets))
    result: list[list[int]] = np.concatenate([inputs, targets], axis=1).tolist()
    return result


@pytest.mark.parametrize("shuffle", [True, False])
def test_lanes_hold_every_document_once_an_epoch_for_three_epochs(
    documents: Documents, tokenizer: TextTokenizer, shuffle: bool
) -> None:
    total, lanes = len(TEXTS), 4
    wanted = {number: ids_of(tokenizer, text) for number, text in enumerate(TEXTS)}
    results: dict[int, list[int]] = {}
    for lane in range(lanes):
        ours = documents.lane(LaneOrder(lanes, SEED, shuffle), lane)
        results |= {lane + ordinal * lanes: ids.tolist() for ordinal, ids in islice(ours, 3 * total // lanes + 1)}
    for epoch in range(3):
        positions = np.arange(epoch * total, (epoch + 1) * total)
        order = shuffled(positions, total, SEED).tolist() if shuffle else list(range(total))
        assert [results[index] for index in positions.tolist()] == [wanted[number] for number in order]
        assert sorted(order) == list(range(total))


def test_concat_is_one_stream_per_lane_whose_rows_share_a_token(documents: Documents, tokenizer: TextTokenizer) -> None:
    ours = documents.lane(LaneOrder(4, SEED, True), 1)
    stream = [token for _, ids in islice(ours, 40) for token in [*ids[:-1].tolist(), int(ids[-1]) | END_BIT]]
    lane = open_lane(documents, "concat", SEQ_LEN, LaneOrder(4, SEED, True), 1)
    for number in range((len(stream) - 1) // SEQ_LEN):
        assert lane.row().tolist() == stream[number * SEQ_LEN : (number + 1) * SEQ_LEN + 1]


def pieces(row: NDArray[np.int32]) -> list[list[int]]:
    """Documents of a row, each up to its mark; the last one may be a whole row without one."""
    result: list[list[int]] = [[]]
    for token in row[row != IGNORE_INDEX].tolist():
        result[-1].append(token & ID_MASK)
        if token & END_BIT:
            result.append([])
    return [piece for piece in result if piece]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.sampled_from([None, 3]))
def test_best_fit_gives_every_token_once_and_cuts_only_documents_above_a_row(
    lengths: list[int], seed: int | None
) -> None:
    given_documents = [np.array([*range(1 + n, n + length), 0], np.uint16) for n, length in enumerate(lengths)]
    endless = enumerate(given_documents * 400)
    lane = BestFitLane(endless, SEQ_LEN, (0, 0), seed)
    lane.row()
    while lane.position[1]:  # to the end of the window
        lane.row()
    window = (given_documents * 400)[: lane.position[0]]
    again = BestFitLane(enumerate(given_documents * 400), SEQ_LEN, (0, 0), seed)
    rows = []
    while again.position != lane.position:
        rows.append(again.row())
    assert sum(int((row != IGNORE_INDEX).sum()) for row in rows) == sum(ids.size for ids in window)
    result = Counter(tuple(piece) for row in rows for piece in pieces(row))
    capacity = SEQ_LEN + 1
    whole = Counter(
        tuple(ids[start : start + capacity].tolist()) for ids in window for start in range(0, ids.size, capacity)
    )
    assert result == whole  # a document that fits is one piece of its own
    assert sum(ids.size for ids in window) >= 3 * capacity > sum(ids.size for ids in window[:-1])


def test_best_fit_wastes_at_most_one_percent_of_log_normal_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for median, seq_len in ((150, 2048), (600, 4096)):
        lengths = np.random.default_rng(0).lognormal(np.log(median), 1.0, 60_000).astype(np.int64) + 2
        lane = BestFitLane(enumerate(np.ones(length, np.uint16) for length in lengths), seq_len, (0, 0), 1)
        rows = [lane.row() for _ in range(900)]
        assert np.mean([row == IGNORE_INDEX for row in rows]) <= 0.01


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize(("dp", "micro"), [(2, 1), (2, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize("most_lanes", [32, 2, 1])
def test_ranks_share_what_one_rank_reads(
    documents: Documents, packing: Packing, dp: int, micro: int, most_lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer lanes than ranks, a rank reads a part of the rows of its lane."""
    monkeypatch.setattr(stream_loader, "MAX_LANES", most_lanes)
    alone = taken(loader(documents, packing), 12)
    ranks = [taken(loader(documents, packing, dp=(rank, dp), micro=micro), 12, depth=rank + 1) for rank in range(dp)]
    for step, batch in enumerate(alone):
        assert [row for rank in ranks for row in rows_of(rank[step])] == rows_of(batch)
        assert sum(rank[step].num_tokens for rank in ranks) == batch.num_tokens


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_from_every_step_of_three_epochs_the_rows_go_on_as_they_would_have(
    documents: Documents, packing: Packing, shuffle: bool
) -> None:
    """One, two and again one rank, each from the positions that the ranks before it left."""
    total = sum(len(ids) for _, ids in islice(documents.lane(IN_ORDER, 0), len(TEXTS)))
    steps = 3 * total // (GLOBAL_BATCH * SEQ_LEN) + 2
    straight = [rows_of(batch) for batch in taken(loader(documents, packing, shuffle=shuffle), steps)]
    positions: Sequence[LanePosition] = ()
    for step in range(steps):
        dp = 1 + step % 2
        ranks = [loader(documents, packing, dp=(r, dp), positions=positions, shuffle=shuffle) for r in range(dp)]
        result = [row for rank in ranks for row in rows_of(taken(rank, 1)[0])]
        assert result == straight[step]
        positions = positions_of(merged([rank.cursor() for rank in ranks]), num_lanes(GLOBAL_BATCH))


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_batches_are_left_out_behind_their_steps_and_the_cursor_counts_them(
    documents: Documents, packing: Packing
) -> None:
    straight = [rows_of(batch) for batch in taken(loader(documents, packing), 9)]
    skipping = loader(documents, packing, skips=((0, 1), (2, 3)))
    assert [rows_of(batch) for batch in taken(skipping, 4)] == [straight[at] for at in (1, 2, 6, 7)]
    positions = positions_of(merged([skipping.cursor()]), num_lanes(GLOBAL_BATCH))
    assert rows_of(taken(loader(documents, packing, positions=positions), 1)[0]) == straight[8]


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_steps_of_a_ramp_take_rows_of_all_lanes_on_any_number_of_ranks_and_after_any_step(
    documents: Documents, packing: Packing
) -> None:
    unit = GLOBAL_BATCH // 2
    ramp = BatchSizes(3 * unit, ((2, unit), (3, 2 * unit)))
    lanes = num_lanes(unit)
    alone = loader(documents, packing, ramp=BatchSizes(unit))
    in_units = [rows_of(batch) for batch in taken(alone, sum(ramp.at(step) // unit for step in range(5)))]
    positions: Sequence[LanePosition] = ()
    for step in range(5):
        parts = [in_units.pop(0) for _ in range(ramp.at(step) // unit)]
        per_lane = unit // lanes
        wanted = [row for at in range(0, unit, per_lane) for part in parts for row in part[at : at + per_lane]]
        dp = 1 + step % 2
        ranks = [loader(documents, packing, dp=(r, dp), positions=positions, ramp=ramp) for r in range(dp)]
        results = []
        for rank in ranks:
            batches = rank.prefetched(step)
            results += rows_of(next(batches))
            batches.close()
        assert results == wanted
        positions = positions_of(merged([rank.cursor() for rank in ranks]), lanes)


def test_the_cursor_is_that_of_what_was_consumed_and_not_of_what_was_read_ahead(documents: Documents) -> None:
    one = loader(documents, "concat")
    batches = one.prefetched(0, depth=5)
    next(batches)
    batches.close()
    other = loader(documents, "concat", positions=positions_of(merged([one.cursor()]), num_lanes(GLOBAL_BATCH)))
    assert rows_of(taken(other, 1)[0]) == rows_of(taken(loader(documents, "concat"), 2)[1])


@pytest.mark.parametrize("given", [3, 4, 5, 900])
def test_a_position_of_other_data_goes_on_with_the_next_window(documents: Documents, given: int) -> None:
    """A window of these documents may have fewer rows than one of the data, or the tokens of `concat`, before."""

    def opened(position: LanePosition) -> Lane:
        return open_lane(documents, "best_fit", SEQ_LEN, LaneOrder(2, SEED, True), 1, position)

    lane = opened((0, 0))
    while lane.position[0] == 0:
        lane.row()
    ahead = opened((0, given))
    if given >= 5:
        expected = [lane.row().tolist() for _ in range(9)]
        assert [ahead.row().tolist() for _ in range(9)] == expected
        assert ahead.position == lane.position
    assert ahead.row().shape == (SEQ_LEN + 1,)
    assert opened(ahead.position).row().tolist() == ahead.row().tolist()


def test_held_out_documents_are_never_trained_on(documents: Documents, tokenizer: TextTokenizer) -> None:
    share = Documents(documents.corpus, documents.tokenizer, VOCABULARY, held_out=0.3)
    held = {number for number in range(len(TEXTS)) if is_held_out(documents.corpus.content(number), share.held_out)}
    assert 3 < len(held) < 25
    result = {tuple(ids.tolist()) for _, ids in islice(share.lane(LaneOrder(1, SEED, True), 0), 2 * len(TEXTS))}
    assert result == {tuple(ids_of(tokenizer, TEXTS[number])) for number in range(len(TEXTS)) if number not in held}
    everything = Documents(documents.corpus, documents.tokenizer, VOCABULARY, held_out=0.999999)
    with pytest.raises(DataError, match="holds out every document"):
        next(everything.lane(LaneOrder(1, SEED, True), 0))
    lanes = LaneOrder(len(TEXTS), SEED, False)  # each lane reads the same document in each epoch
    with pytest.raises(DataError, match=rf"of the 1 that one of {len(TEXTS)} lanes reads .* set data.shuffle=true"):
        next(share.lane(lanes, min(held)))


def test_lanes_divide_the_batch_whatever_it_is() -> None:
    for batch in range(1, 200):
        assert batch % num_lanes(batch) == 0
        assert num_lanes(batch) <= MAX_LANES
    assert [num_lanes(batch) for batch in (1, 8, 37, 1024)] == [1, 8, 1, 32]
    with pytest.raises(CheckpointError, match=r"8 lanes, and train\.global_batch here makes 4"):
        positions_of({"places": [[0, 0]] * 8}, 4)


def test_damage_and_ids_outside_of_the_vocabulary_are_named(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    prepare(write_corpus(tmp_path / "src", "a.jsonl", TEXTS), out=tmp_path / "text.arrow")
    drop_checksums(tmp_path / "text.arrow")
    content = (tmp_path / "text.arrow").read_bytes()
    (tmp_path / "text.arrow").write_bytes(content.replace(b"5: snow", b"5: sn\xffw"))
    damaged = Documents(PreparedCorpus(tmp_path / "text.arrow"), tokenizer, VOCABULARY)
    with pytest.raises(DataError, match=r"text\.arrow, document 5 of 37, is damaged: its text is not UTF-8"):
        list(islice(damaged.lane(IN_ORDER, 0), len(TEXTS)))
    prepare(tmp_path / "src", out=tmp_path / "ids.arrow", tokenizer=tokenizer.path)
    small = Documents(PreparedCorpus(tmp_path / "ids.arrow"), None, 100)
    with pytest.raises(DataError, match="outside of the vocabulary, 0 to 99"):
        next(small.lane(IN_ORDER, 0))
