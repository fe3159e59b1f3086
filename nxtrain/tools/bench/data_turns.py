"""Turns of tokenization and packing, each next to the bare tokenizer on the same documents.

A turn makes the rows of one window of `best_fit`. The bare tokenizer gets the texts of the turn right before or after
it, in alternation, since the second of both has the texts in the caches. Documents that lie in the packer at the end of
a turn count as well: they were tokenized.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from statistics import median
from typing import Any, cast

from tokenizers import Encoding, Tokenizer

from nxtrain.data.arrow.lanes import CorpusLanes
from nxtrain.data.arrow.streams import WINDOW_ROWS, open_lane
from nxtrain.data.stream_loader import BEGIN, LaneOrder, Place
from nxtrain.tools.bench import harness


class TimedTokenizer:
    """Tokenizer that collects its texts, and counts its CPU seconds of all threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []
        self.spent_s = 0.0

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool = True) -> list[Encoding]:
        """Encode texts by the tokenizer."""
        began = time.process_time()
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        self.spent_s += time.process_time() - began
        self.texts += texts
        return encoded


@dataclass(frozen=True)
class TextTime:
    """CPU seconds of all threads in a turn."""

    own_s: float  # seconds of the side, including those inside its tokenizer
    inside_s: float  # seconds inside the side's tokenizer
    bare_s: float  # seconds of the bare tokenizer on the same documents
    tokens: int  # tokens of the documents, each with the end of text


TextTurn = Callable[[bool], TextTime]
"""Function that packs a window, and encodes its texts by the bare tokenizer: before if its argument is true."""


def packing_turns(source: CorpusLanes, number: int, mark: Callable[[str], None] | None = None) -> list[TextTurn]:
    """Turns that tokenize and pack one window each, in the order of training; with `mark` one document at a time."""
    documents = source.documents(mark)[0]
    assert documents.tokenizer is not None
    text_tokenizer = documents.tokenizer

    def pack(begin: Place, tokenizer: Tokenizer) -> Place:
        timed = replace(documents, tokenizer=replace(text_tokenizer, tokenizer=tokenizer))
        lane = open_lane(timed, source.packing, source.seq_len, LaneOrder(1, 0, True), 0, begin)
        lane.row()
        if source.packing == "best_fit":
            while lane.place[1]:
                lane.row()
        else:
            for _ in range(WINDOW_ROWS - 1):
                lane.row()
        return lane.place

    turns: list[TextTurn] = []
    begin = BEGIN
    for _ in range(number):
        first = TimedTokenizer(text_tokenizer.tokenizer)
        end = pack(begin, cast("Tokenizer", first))
        turns.append(partial(_take, partial(pack, begin), text_tokenizer.tokenizer, first.texts))
        begin = end
    return turns


def _take(act: Callable[[Tokenizer], object], tokenizer: Tokenizer, texts: list[str], bare_first: bool) -> TextTime:
    timed, bare = TimedTokenizer(tokenizer), TimedTokenizer(tokenizer)
    encoded: list[Encoding] = []
    if bare_first:
        encoded = bare.encode_batch_fast(texts, add_special_tokens=False)
    began = time.process_time()
    act(cast("Tokenizer", timed))
    own_s = time.process_time() - began
    if not bare_first:
        encoded = bare.encode_batch_fast(texts, add_special_tokens=False)
    tokens = sum(len(document.ids) + 1 for document in encoded)
    return TextTime(own_s, timed.spent_s, bare.spent_s, tokens)


def take_text_turns(sides: Mapping[str, Sequence[TextTurn]], rounds: int) -> dict[str, Any]:
    """Speed of each side next to the bare tokenizer on the same documents.

    Returns:
        `tokens`: those of each side's documents. `rows`: tokens per CPU second of each side and of the bare tokenizer
        next to each, in every round. `inside`: share of a side's CPU time inside of the tokenizer. `ratios`: speed of a
        side over that of the bare tokenizer. The latter two are medians over all turns.
    """

    def taker(turns: Sequence[TextTurn]) -> Callable[[], list[TextTime]]:
        numbers = count()
        return lambda: [turn(number % 2 == 1) for number, turn in enumerate(turns, next(numbers))]

    times = harness.take_turns({name: taker(turns) for name, turns in sides.items()}, rounds, label="tokenizing, ")
    result: dict[str, Any] = {"tokens": {}, "rows": [], "inside": {}, "ratios": {}}
    for name, taken in times.items():
        tokens = sum(spent.tokens for spent in taken[0])
        rates = [tokens / sum(spent.own_s for spent in turns) for turns in taken]
        bare = [tokens / sum(spent.bare_s for spent in turns) for turns in taken]
        spent = list(chain.from_iterable(taken))
        result["tokens"][name] = tokens
        result["rows"].append(harness.row(name, "tokens/s", rates, bare=bare))
        result["inside"][name] = median(turn.inside_s / turn.own_s for turn in spent)
        result["ratios"][name] = median(turn.bare_s / turn.own_s for turn in spent)
    return result
