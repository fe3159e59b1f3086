"""Measurements of tokenization and packing, compared with the bare tokenizer on the same documents.

One measurement makes the rows of one `best_fit` window. The documents are tokenized in groups. The bare tokenizer
encodes each group too, alternately before and after the measured call. A group takes about 50 ms, so both calls see the
same documents at the same machine speed. Documents still in the packer's buffer at the end also count, since they were
tokenized.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count
from statistics import geometric_mean, median
from typing import Any, cast

from tokenizers import Encoding, Tokenizer

from nxtrain.data.arrow.streams import WINDOW_ROWS, CorpusLanes, open_lane
from nxtrain.data.stream_loader import BEGIN, LaneOrder, LanePosition
from nxtrain.data.tokenization import TextTokenizer
from nxtrain.tools.bench import harness


@dataclass
class TextTime:
    """CPU seconds of all threads in one measurement, and the number of tokens in its documents."""

    own_s: float = 0.0  # seconds of the packing mode, including those inside its tokenizer
    inside_s: float = 0.0  # seconds inside the packing mode's tokenizer
    bare_s: float = 0.0  # seconds of the bare tokenizer on the same documents
    tokens: int = 0  # tokens of the documents, each with the end of text

    # For each call: the bare tokenizer's time over the measured call's, and True if the bare one ran first.
    calls: list[tuple[float, bool]] = field(default_factory=list)


@dataclass
class WatchedTokenizer:
    """Tokenizer that measures its own CPU time, and that of the bare tokenizer on the same texts."""

    tokenizer: Tokenizer
    spent: TextTime = field(default_factory=TextTime)  # so far, without `own_s`
    bare_first: bool = False  # at the next call; the order alternates

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool = True) -> list[Encoding]:
        """Encode texts with the tokenizer, and add the CPU times of both tokenizers to `spent`."""
        bare_s = 0.0
        if self.bare_first:
            bare_s = self._encode_bare(texts)
        began = time.process_time()
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        inside_s = time.process_time() - began
        if not self.bare_first:
            bare_s = self._encode_bare(texts)
        self.spent.bare_s += bare_s
        self.spent.inside_s += inside_s
        self.spent.calls.append((bare_s / inside_s, self.bare_first))
        self.bare_first = not self.bare_first
        return encoded

    def _encode_bare(self, texts: list[str]) -> float:
        began = time.process_time()
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        self.spent.tokens += sum(len(document.ids) + 1 for document in encoded)
        return time.process_time() - began


TextTurn = Callable[[bool], TextTime]
"""One measurement of a packing mode; the argument is True if the bare tokenizer runs first."""


def packing_turns(source: CorpusLanes, number: int, mark: Callable[[str], None] | None = None) -> list[TextTurn]:
    """Make measurement functions that each tokenize and pack one window, in the order of training.

    Args:
        number: Number of windows.
        mark: Called with the name of each document, as in a worker process. None: documents are tokenized in groups.
    """
    documents = source.documents(mark)[0]
    assert documents.tokenizer is not None
    of_documents: TextTokenizer = documents.tokenizer

    def window(begin: LanePosition, tokenizer: Tokenizer) -> LanePosition:
        watched = replace(documents, tokenizer=replace(of_documents, tokenizer=tokenizer))
        lane = open_lane(watched, source.packing, source.seq_len, LaneOrder(1, 0, True), 0, begin)
        lane.row()
        if source.packing == "best_fit":
            while lane.position[1]:
                lane.row()
        else:
            for _ in range(WINDOW_ROWS - 1):
                lane.row()
        return lane.position

    def turn(begin: LanePosition, bare_first: bool) -> TextTime:
        watched = WatchedTokenizer(of_documents.tokenizer, bare_first=bare_first)
        began = time.process_time()
        window(begin, cast("Tokenizer", watched))
        watched.spent.own_s = time.process_time() - began - watched.spent.bare_s
        return watched.spent

    turns: list[TextTurn] = []
    begin = BEGIN
    for _ in range(number):
        turns.append(partial(turn, begin))
        begin = window(begin, of_documents.tokenizer)
    return turns


def take_text_turns(sides: Mapping[str, Sequence[TextTurn]], rounds: int) -> dict[str, Any]:
    """Measure the speed of each packing mode relative to the bare tokenizer on the same documents.

    Returns:
        `tokens`: tokens in each mode's documents. `rows`: tokens per CPU second of each mode and of the bare tokenizer,
        in every round. `inside`: share of a mode's CPU time spent inside the tokenizer. `ratios`: speed of each mode
        over that of the bare tokenizer, from `speed_ratio`.
    """

    def taker(turns: Sequence[TextTurn]) -> Callable[[], list[TextTime]]:
        """Make a function that runs all measurements of a packing mode.

        The order of both tokenizers alternates between rounds.
        """
        rounds = count()
        return lambda: [turn(number % 2 == 1) for number, turn in enumerate(turns, next(rounds))]

    times = harness.take_turns({name: taker(turns) for name, turns in sides.items()}, rounds, label="tokenizing, ")
    result: dict[str, Any] = {"tokens": {}, "rows": [], "inside": {}, "ratios": {}}
    for name, taken in times.items():
        tokens = sum(spent.tokens for spent in taken[0])
        rates, bare = [], []
        for spent in taken:
            rates.append(tokens / sum(turn.own_s for turn in spent))
            bare.append(tokens / sum(turn.bare_s for turn in spent))
        counted = list(chain.from_iterable(taken))
        result["tokens"][name] = tokens
        result["rows"].append(harness.row(name, "tokens/s", rates, bare=bare))
        result["inside"][name] = median(spent.inside_s / spent.own_s for spent in counted)
        result["ratios"][name] = speed_ratio(counted)
    return result


def speed_ratio(turns: Sequence[TextTime]) -> float:
    """Speed of a packing mode relative to the bare tokenizer, from the time ratio of each pair of calls.

    The time ratio of a pair is independent of the machine's speed, while sums of times are not. The share of CPU time
    outside the calls is independent of the machine's speed too. The second tokenizer of a pair finds the text in the
    caches, so both orders have equal weight.
    """
    calls = list(chain.from_iterable(turn.calls for turn in turns))
    medians = []
    for order in (False, True):
        ratios = [ratio for ratio, bare_first in calls if bare_first == order]
        if ratios:
            medians.append(median(ratios))
    return geometric_mean(medians) * median(turn.inside_s / turn.own_s for turn in turns)
