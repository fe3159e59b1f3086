"""Turns of tokenization and packing, each beside the bare tokenizer on the very documents that the turn tokenized.

A turn makes the rows of one window of `best_fit`, and takes a fraction of a second. The bare tokenizer gets its
documents at once, before or behind the turn in alternation. So neither the documents nor the drift of the machine's
speed divide both. Documents that lie in the packer at the end of a turn count as well: they were tokenized.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, cast

from tokenizers import Encoding, Tokenizer

from nxtrain.data.arrow.lanes import CorpusLanes
from nxtrain.data.arrow.streams import WINDOW_ROWS, open_lane
from nxtrain.data.stream_loader import BEGIN, LaneOrder, Place
from nxtrain.data.tokenization import TextTokenizer

GROUP_CHARS = 1 << 20
"""Text that the bare tokenizer gets at once, so that its threads have work."""


@dataclass
class WatchedTokenizer:
    """A tokenizer that notes the texts that it gets, and its CPU time.

    Args:
        tokenizer: The tokenizer.

    Attributes:
        texts: Texts so far.
        cpu_s: CPU seconds so far, of all threads.
    """

    tokenizer: Tokenizer
    texts: list[str] = field(default_factory=list)
    cpu_s: float = 0.0

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool = True) -> list[Encoding]:
        """Encode texts by the tokenizer."""
        began = time.process_time()
        found: list[Encoding] = self.tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        self.cpu_s += time.process_time() - began
        self.texts += texts
        return found


@dataclass(frozen=True)
class Turn:
    """Part of a side's work.

    Args:
        act: Does the work; returns the CPU seconds that went into the tokenizer, 0 if they are unknown.
        texts: Texts that the work tokenizes.
    """

    act: Callable[[], float]
    texts: Sequence[str]


def packing_turns(source: CorpusLanes, number: int, mark: Callable[[str], None] | None = None) -> list[Turn]:
    """Turns that tokenize and pack one window each, in the order of training.

    Args:
        source: Lanes of a corpus of text.
        number: Turns.
        mark: Called with the name of each document, as in a worker; None: documents are tokenized in groups.
    """
    documents = source.documents(mark)[0]
    assert documents.tokenizer is not None
    known: TextTokenizer = documents.tokenizer

    def window(place: Place) -> tuple[Place, WatchedTokenizer]:
        watched = WatchedTokenizer(known.tokenizer)
        own = replace(documents, tokenizer=replace(known, tokenizer=cast("Tokenizer", watched)))
        lane = open_lane(own, source.packing, source.seq_len, LaneOrder(1, 0, True), 0, place)
        lane.row()
        made = 1
        while lane.place[1] if source.packing == "best_fit" else made < WINDOW_ROWS:
            lane.row()
            made += 1
        return lane.place, watched

    turns, place = [], BEGIN
    for _ in range(number):
        behind, watched = window(place)
        turns.append(Turn(lambda place=place: window(place)[1].cpu_s, watched.texts))  # type: ignore[misc]
        place = behind
    return turns


def encode_all(tokenizer: TextTokenizer, texts: Sequence[str]) -> int:
    """Encode texts, and read the ids in the form that the tokenizer gives them; returns the number of tokens."""
    groups, num_chars = [list[str]()], 0
    for text in texts:
        if num_chars > GROUP_CHARS:
            groups.append([])
            num_chars = 0
        groups[-1].append(text)
        num_chars += len(text)
    encode = tokenizer.tokenizer.encode_batch_fast
    return sum(len(each.ids) + 1 for group in groups for each in encode(group, add_special_tokens=False))


def take_text_turns(sides: Mapping[str, Sequence[Turn]], tokenizer: TextTokenizer, rounds: int) -> dict[str, Any]:
    """Speed of each side beside the bare tokenizer on the same documents.

    Args:
        sides: Turns of each side.
        tokenizer: The bare tokenizer.
        rounds: Times that each turn runs, after one round that warms up.

    Returns:
        `rows`: tokens per CPU second of each side and of the bare tokenizer beside each, in every round. `ratios`:
        medians of both over each other. `inside`: share of a side's CPU time inside of the tokenizer, where known.
    """
    num_tokens = {
        name: encode_all(tokenizer, [text for turn in turns for text in turn.texts]) for name, turns in sides.items()
    }
    own, bare, inside = ({name: list[float]() for name in sides} for _ in range(3))
    for each in range(rounds + 1):
        for name, turns in sides.items():
            spent = [0.0, 0.0, 0.0]
            for number, turn in enumerate(turns):
                for part in ((0, 1), (1, 0))[(each + number) % 2]:
                    began = time.process_time()
                    if part:
                        encode_all(tokenizer, turn.texts)
                    else:
                        spent[2] += turn.act()
                    spent[part] += time.process_time() - began
            if each:
                own[name].append(num_tokens[name] / spent[0])
                bare[name].append(num_tokens[name] / spent[1])
                inside[name].append(spent[2] / spent[0])
    return {
        "tokens": num_tokens,
        "rows": [
            {"name": name, "value": median(own[name]), "unit": "tokens/s", "rounds": own[name], "bare": bare[name]}
            for name in sides
        ],
        "ratios": {name: median(a / b for a, b in zip(own[name], bare[name], strict=True)) for name in sides},
        "inside": {name: median(found) for name, found in inside.items() if any(found)},
    }
