"""Turns of tokenization and packing, each next to the bare tokenizer on the same documents.

A turn makes the rows of one window of `best_fit`. Whenever the turn tokenizes a group of documents, the bare
tokenizer gets the same group at once, before or after the turn's own call in alternation. A group takes some 50
ms. So both see the same documents at the same speed of the machine. Documents that lie in the packer at the end
of a turn count as well: they were tokenized.
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
    """CPU seconds of all threads in a turn, and the tokens of the turn's documents."""

    own_s: float = 0.0  # seconds of the side, including those inside its tokenizer
    inside_s: float = 0.0  # seconds inside the side's tokenizer
    bare_s: float = 0.0  # seconds of the bare tokenizer on the same documents
    tokens: int = 0  # tokens of the documents, each with the end of text

    # For each call, the bare tokenizer's time divided by that of the side's, and True if the bare one ran first.
    calls: list[tuple[float, bool]] = field(default_factory=list)


@dataclass
class WatchedTokenizer:
    """Tokenizer that counts its CPU time, and that of the bare tokenizer on the same texts."""

    tokenizer: Tokenizer
    spent: TextTime = field(default_factory=TextTime)  # so far, without `own_s`
    bare_first: bool = False  # at the next call; the order alternates

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool = True) -> list[Encoding]:
        """Encode texts by the tokenizer."""
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
"""One turn of a side's work; the argument is True if the bare tokenizer runs first."""


def packing_turns(source: CorpusLanes, number: int, mark: Callable[[str], None] | None = None) -> list[TextTurn]:
    """Turns that tokenize and pack one window each, in the order of training.

    Args:
        mark: Called with the name of each document, as in a worker; None: documents are tokenized in groups.
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
    """Measure the speed of each loader, relative to the tokenizer alone on the same documents.

    Returns:
        `tokens`: tokens of each side's documents. `rows`: tokens per CPU second of each side and of the bare tokenizer
        next to each, in every round. `inside`: share of a side's CPU time inside of the tokenizer. `ratios`: speed of a
        side over that of the bare tokenizer, by `speed_ratio`.
    """

    def taker(turns: Sequence[TextTurn]) -> Callable[[], list[TextTime]]:
        """Function that takes all turns of a side; the order of both tokenizers alternates from round to round."""
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
    """Speed of a side over that of the bare tokenizer, by the ratio of both times of each call.

    Sums of times follow the machine's speed at the time. The ratio of both times of a call does not, nor does the share
    of a turn outside of the calls. The second tokenizer finds the text in the caches, so both orders count the same.
    """
    calls = list(chain.from_iterable(turn.calls for turn in turns))
    medians = []
    for order in (False, True):
        ratios = [ratio for ratio, bare_first in calls if bare_first == order]
        if ratios:
            medians.append(median(ratios))
    return geometric_mean(medians) * median(turn.inside_s / turn.own_s for turn in turns)
