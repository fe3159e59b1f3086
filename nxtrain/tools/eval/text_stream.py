"""Streamed text: tokens decoded to whole characters, and the end at a stop text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Character that a tokenizer decodes from bytes that form no whole character."""


class Detokenizer:
    """Text of a growing list of tokens, in pieces that split no character.

    Tokens are decoded together with the tokens before them, since the first token of a text may lose its space.

    Args:
        tokenizer: Decodes the tokens.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = self._shown = 0

    def add(self, ids: Sequence[int], *, is_whole: bool = False) -> str:
        """Append tokens and return the new whole characters.

        Args:
            ids: The tokens.
            is_whole: No further token belongs to the last character, which may be `_UNFINISHED` itself.
        """
        self._ids += ids
        text = self._new_text()
        if not text or (text.endswith(_UNFINISHED) and not is_whole):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text

    def rest(self) -> str:
        """Text at the end that forms no whole character."""
        return self._new_text()

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[self._context : self._shown])
        return str(self._tokenizer.decode(self._ids[self._context :])[len(before) :])


class Stops:
    """Filter that ends a text before the first stop text.

    Args:
        texts: Stop texts, none of them empty.

    Attributes:
        found: A stop text was found, and the text has ended.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts, self._held, self.found = tuple(texts), "", False

    def add(self, text: str) -> str:
        """Append text and return the part to show: all before a stop text, or before an end that may begin one."""
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
        """Return the text that was held back."""
        shown, self._held = self._held, ""
        return shown
