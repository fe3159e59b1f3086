"""Mixtures: shares that hold before every row, each corpus in its own order, and any position to go on from."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxtrain.common.errors import CheckpointError, DataError
from nxtrain.config.bounds import MAX_PERIOD, row_shares
from nxtrain.data.arrow import streams
from nxtrain.data.arrow.streams import MixedLane
from nxtrain.data.dataset import Data
from nxtrain.data.loader import BatchShare, Loader
from nxtrain.data.mixture import MixedSamples, Mixture
from nxtrain.data.samples import TableSamples
from nxtrain.data.stream_loader import BEGIN, LaneOrder, LanePosition, LocalLanes, StreamLoader, merged, positions_of
from nxtrain.data.tokenization import TextTokenizer, load_tokenizer
from tests.support.corpora import NumberedLane, prepare, write_corpus, write_tokenizer
from tests.unit.data.conftest import open_at

VOCABULARY, SEQ_LEN = 300, 24
WEIGHT = st.one_of(st.integers(1, 40).map(float), st.integers(1, 60).map(lambda tenths: tenths / 10))
WEIGHTS = st.lists(WEIGHT, min_size=1, max_size=7)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WINDOW_ROWS", 3)
    monkeypatch.setattr(streams, "_GROUP_BYTES", 100)


def mixture_of(weights: list[float]) -> Mixture:
    return Mixture.of([f"{number}" for number in range(len(weights))], weights)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(WEIGHTS, st.integers(0, 10**12))
def test_before_every_row_each_corpus_is_within_one_row_of_its_share(weights: list[float], far: int) -> None:
    exact = [Fraction(repr(weight)) for weight in weights]
    mixture = mixture_of(weights)
    begin = far // mixture.period * mixture.period
    before = mixture.counts(begin)
    assert before == [begin * weight / sum(exact) for weight in exact]
    positions = np.arange(begin, begin + 2 * mixture.period + 3)
    corpora, numbers = mixture.rows(positions)
    is_of = corpora[:, None] == np.arange(len(weights))
    behind = np.cumsum(is_of, axis=0)
    shares = np.array([int(weight / sum(exact) * mixture.period) for weight in exact])
    # In integers: the deviation times the period.
    wanted = np.outer(np.arange(1, positions.size + 1), shares)
    assert np.abs(behind * mixture.period - wanted).max() < mixture.period
    assert numbers.tolist() == (np.array(before) + behind - 1)[is_of].tolist()
    assert mixture.counts(int(positions[-1]) + 1) == (np.array(before) + behind[-1]).tolist()


def test_shares_are_the_smallest_integers_of_the_weights_as_written() -> None:
    assert row_shares([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert row_shares([2.0, 4.0]) == (1, 2)
    assert len({mixture_of([1.0] * 5).seed(3, corpus) for corpus in range(5)}) == 5
    assert row_shares([0.1 + 0.2, 0.3])[0] > MAX_PERIOD  # written as 0.30000000000000004
    assert Mixture.of(["a", "b", "c"], []).shares == (1, 1, 1)
    assert Mixture.of(["x/web.arrow", "y/web.arrow", "y/code.arrow"], []).labels == (
        "x/web.arrow",
        "y/web.arrow",
        "code",
    )


def table(corpus: int, num_rows: int) -> TableSamples:
    """Rows that name the corpus and the row."""
    return TableSamples(np.tile(1000 * corpus + np.arange(num_rows)[:, None], (1, 4)))


@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_a_mixture_of_tables_in_which_each_corpus_has_its_own_epochs(shuffle: bool) -> None:
    sizes = (5, 11, 3)
    mixed = MixedSamples(mixture_of([0.5, 0.4, 0.1]), tuple(table(k, size) for k, size in enumerate(sizes)))
    alone = Loader(mixed, BatchShare(8, 2), seed=3, shuffle=shuffle)
    for dp in (2, 4):
        ranks = [Loader(mixed, BatchShare(8, 1, rank, dp), seed=3, shuffle=shuffle) for rank in range(dp)]
        for step in range(12):
            ours = np.concatenate([rank.batch(step).inputs.reshape(-1, 3) for rank in ranks])
            assert ours.tolist() == alone.batch(step).inputs.reshape(-1, 3).tolist()
    result = [int(row[0]) for step in range(15) for row in alone.batch(step).inputs.reshape(-1, 3)]
    for corpus, size in enumerate(sizes):
        own = [row % 1000 for row in result if row // 1000 == corpus]
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(size))
    progress = alone.progress(15)
    assert progress["tokens/0"] == 60 * 3
    assert progress["epochs/1"] == round(48 / 11, 6)


def test_a_mixture_of_one_corpus_is_the_corpus() -> None:
    rows = table(0, 17)
    mixed = MixedSamples(mixture_of([0.3]), (rows,))
    for step in range(6):
        ours, theirs = (Loader(x, BatchShare(4, 2), seed=9, shuffle=True).batch(step) for x in (mixed, rows))
        assert ours.inputs.tolist() == theirs.inputs.tolist()
    assert Loader(rows, BatchShare(4, 2), seed=9, shuffle=True).progress(3) == {}


def lanes_of(mixture: Mixture, lanes: int, positions: dict[int, LanePosition]) -> LocalLanes:
    order = LaneOrder(lanes, 5, True)

    def open_lane(lane: int, position: LanePosition) -> MixedLane:
        def open_part(corpus: int, begin: LanePosition) -> NumberedLane:
            return NumberedLane(100 * corpus + lane, begin, None, -1)

        return MixedLane(mixture, open_part, order, lane, position)

    return LocalLanes(open_lane, positions, 1)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 12).map(float), min_size=1, max_size=5), st.sampled_from([1, 2, 4, 8]))
def test_lanes_keep_the_shares_at_every_step_and_go_on_from_any(weights: list[float], lanes: int) -> None:
    mixture = mixture_of(weights)
    positions: dict[int, LanePosition] = dict.fromkeys(range(lanes), BEGIN)
    straight, result = lanes_of(mixture, lanes, positions), Counter[int]()
    by_lane = Counter[tuple[int, int]]()
    steps = 24
    for step in range(steps):
        ours = lanes_of(mixture, lanes, positions).rows(step)  # a new start in every step
        rows = straight.rows(step)
        assert {lane: (r.tolist(), p) for lane, (r, p) in ours.items()} == {
            lane: (r.tolist(), p) for lane, (r, p) in rows.items()
        }
        positions = {lane: position for lane, (_, position) in ours.items()}
        for lane, (row, _) in rows.items():
            corpus = int(row[0, 0]) // 100_000
            assert int(row[0, 0]) % 100_000 // 1000 == lane
            result[corpus] += 1
            by_lane[corpus, lane] += 1
        done = (step + 1) * lanes
        for corpus, share in enumerate(mixture.shares):
            assert abs(result[corpus] - Fraction(done * share, mixture.period)) < 1
    for corpus, share in enumerate(mixture.shares):
        for lane in range(lanes):  # no lane is without a corpus: five deviations of a draw
            mean = steps * share / mixture.period
            assert abs(by_lane[corpus, lane] - mean) <= 5 * max(1.0, mean**0.5)


class Corpora:
    """Two corpora of different words, and a tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tokenizer = folder, write_tokenizer(folder / "t", VOCABULARY)
        for name, number in (("snow", 30), ("rain", 19)):
            write_corpus(folder / name, "a.jsonl", [f"{name} {item} " * (item % 5 + 1) for item in range(number)])
            prepare(folder / name, out=folder / f"{name}.arrow")
        prepare(folder / "rain", out=folder / "ids.arrow", tokenizer=self.tokenizer)

    def open(self, *names: str, **options: Any) -> Data:
        mixture = tuple(str(self.folder / name) for name in names)
        shape = {"seq_len": SEQ_LEN, "vocab_size": VOCABULARY, "validation_rows": 4}
        return open_at(self.folder / "work", **shape, source="arrow", mixture=mixture, **options)

    def tokenizer_of_data(self) -> TextTokenizer:
        return load_tokenizer(self.tokenizer, VOCABULARY)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    return Corpora(tmp_path_factory.mktemp("corpora"))


def loaded(data: Data, dp: tuple[int, int] = (0, 1), positions: list[LanePosition] | None = None) -> StreamLoader:
    source: Any = data.source
    order = LaneOrder(4, 1, True)
    return StreamLoader(
        partial(LocalLanes, partial(source.source.opened(), order)),
        4,
        BatchShare(8, 1, *dp),
        end_id=data.end_id or 0,
        positions=positions or (),
        progress=partial(source.progress, 4),
    )


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_rows_of_a_mixture_of_text_and_ids_are_of_one_corpus_each(corpora: Corpora, packing: str) -> None:
    """From the positions that other ranks left in every step."""
    options = {"weights": (3.0, 1.0), "tokenizer": str(corpora.tokenizer), "packing": packing}
    data = corpora.open("snow.arrow", "ids.arrow", **options)
    tokenizer, alone = corpora.tokenizer_of_data(), loaded(data)
    positions: list[LanePosition] = []
    counts = Counter[str]()
    for step, batch in enumerate(islice(alone.prefetched(0), 12)):
        ranks = [loaded(data, (rank, 1 + step % 2), positions) for rank in range(1 + step % 2)]
        ours = [next(rank.prefetched(step)) for rank in ranks]
        rows = batch.inputs.reshape(-1, SEQ_LEN)
        assert np.concatenate([own.inputs.reshape(-1, SEQ_LEN) for own in ours]).tolist() == rows.tolist()
        assert ranks[0].progress(step + 1) == alone.progress(step + 1)
        positions = positions_of(merged([rank.cursor() for rank in ranks]), 4, corpora=2)
        for row in rows.tolist():
            text = tokenizer.tokenizer.decode(row)
            assert ("snow" in text) != ("rain" in text), text
            counts["snow" if "snow" in text else "rain"] += 1
        assert abs(counts["snow"] - 0.75 * 8 * (step + 1)) < 1
    progress = alone.progress(12)
    assert [progress[f"tokens/{name}"] for name in ("snow", "ids")] == [SEQ_LEN * counts[n] for n in ("snow", "rain")]
    assert all(0 < progress[f"epochs/{name}"] < 9 for name in ("snow", "ids"))
    with pytest.raises(CheckpointError, match="a mixture of 2 corpora, and this run reads 1"):
        positions_of(merged([alone.cursor()]), 4)


def test_a_tokenizer_and_held_out_rows_come_from_all_corpora(corpora: Corpora) -> None:
    data = corpora.open("snow.arrow", "rain.arrow", validation_fraction=0.4)
    assert data.validation is not None
    assert data.tokenizer is not None
    tokenizer = load_tokenizer(data.tokenizer, VOCABULARY)
    assert tokenizer.tokenizer.token_to_id("snow") is not None
    assert tokenizer.tokenizer.token_to_id("rain") is not None
    text = tokenizer.tokenizer.decode(data.validation.rows(np.arange(data.validation.num_rows)).ravel().tolist())
    assert "snow" in text
    assert "rain" in text
    other = corpora.open("snow.arrow", "rain.arrow", validation_fraction=0.4, weights=(2.0, 1.0))
    assert other.fingerprint != data.fingerprint
    with pytest.raises(DataError, match=r"text and ids, or ids of several tokenizers; name the one in data\.tokenizer"):
        corpora.open("snow.arrow", "ids.arrow")
