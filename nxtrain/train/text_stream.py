"""Text that is shown while it grows: tokens to whole characters, and the end at a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Stands for bytes that are no whole character, as a tokenizer decodes them."""


class Detokenizer:
    """The text of a growing list of tokens, in pieces that split no character.

    Tokens are decoded together with those before them, since the first of a text may lose its space.

    Args:
        tokenizer: Decodes them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = self._shown = 0

    def add(self, ids: Sequence[int]) -> str:
        """Append tokens; the text that is whole by then and was not returned before."""
        self._ids += ids
        text = self._new_text()
        if not text or text.endswith(_UNFINISHED):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text

    def rest(self) -> str:
        """The text at the end that is no whole character."""
        return self._new_text()

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[self._context : self._shown])
        return str(self._tokenizer.decode(self._ids[self._context :])[len(before) :])


class Stops:
    """The end of a text before the first of some stop texts.

    Args:
        texts: None of them is empty.

    Attributes:
        found: The text has ended.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts, self._held, self.found = tuple(texts), "", False

    def add(self, text: str) -> str:
        """Append text; the part of it, and of what was held back, that begins no stop text."""
        self._held += text
        starts = [start for stop in self._texts if (start := self._held.find(stop)) >= 0]
        if starts:
            self._held, self.found = self._held[: min(starts)], True
            return self.rest()
        sizes = [n for stop in self._texts for n in range(1, len(stop)) if self._held.endswith(stop[:n])]
        safe = len(self._held) - max(sizes, default=0)
        shown, self._held = self._held[:safe], self._held[safe:]
        return shown

    def rest(self) -> str:
        """The text that was held back."""
        shown, self._held = self._held, ""
        return shown
