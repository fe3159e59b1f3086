"""Preference data: two answers to one prompt, as strings or as turns of a conversation, become two documents.

The forms are those of Hugging Face's data sets: `chosen` and `rejected` beside a `prompt`, or with a prompt that both
begin with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nxtrain.data.arrow.chat import ChatTemplate, Message, checked_turns
from nxtrain.data.arrow.rows import INVALID_UTF8, MISSING_FIELD, WRONG_TYPE, BadRowError

FIELDS = ("prompt", "chosen", "rejected")
"""Fields or columns of a pair; the first one may be absent."""

BAD_PAIR = "bad pair"


class PairWriter:
    """Writer of the documents of pairs.

    Args:
        chat: Template by which turns are written; None: prompts and answers are strings.
    """

    def __init__(self, chat: ChatTemplate | None) -> None:
        self._chat = chat

    def documents(self, values: Sequence[object]) -> Iterator[tuple[bytes, int]]:
        """Documents of a pair: the chosen answer, then the rejected one, each with the bytes of its prompt.

        Args:
            values: Prompt, or None, then the chosen and the rejected answer.
        """
        for name, value in zip(FIELDS[1:], values[1:], strict=True):
            if value is None:
                raise BadRowError(MISSING_FIELD, f'no "{name}"; a pair has "chosen", "rejected" and perhaps "prompt"')
        if self._chat is not None:
            yield from self._of_turns(self._chat, values)
            return
        prompt, chosen, rejected = (_text(name, value) for name, value in zip(FIELDS, values, strict=True))
        if values[0] is None:
            prompt = _shared_text(chosen, rejected)
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        _refuse_useless(chosen, rejected)
        for answer in (chosen, rejected):
            yield (prompt + answer).encode(), len(prompt.encode())

    def _of_turns(self, chat: ChatTemplate, values: Sequence[object]) -> Iterator[tuple[bytes, int]]:
        prompt: list[Message] = []
        if values[0] is not None:
            prompt = _turns("prompt", values[0], "user")
        talks = []
        for name, value in zip(FIELDS[1:], values[1:], strict=True):
            turns = _turns(name, value, "assistant")
            if not _holds(turns, prompt):
                turns = [*prompt, *turns]
            talks.append(turns)
        chosen, rejected = talks
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        if shared == len(chosen) == len(rejected):
            _refuse_useless("equal", "equal")
        for name, turns in zip(FIELDS[1:], talks, strict=True):
            if len(turns) != shared + 1 or turns[-1]["role"] != "assistant":
                detail = f"{name} has {len(turns) - shared} turns after the {shared} that both answers share"
                raise BadRowError(BAD_PAIR, f"{detail}; an answer is one turn of the assistant")
        _refuse_useless(chosen[-1]["content"], rejected[-1]["content"])
        for turns in talks:
            yield chat.last_answer(turns)


def _text(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        raise BadRowError(WRONG_TYPE, f'"{name}" is a list of turns; give --chat, which writes them by the template')
    if not isinstance(value, str):
        raise BadRowError(WRONG_TYPE, f'"{name}" is no string')
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise BadRowError(INVALID_UTF8, f'"{name}" holds half of a surrogate pair')
    return value


def _turns(name: str, value: object, role: str) -> list[Message]:
    """Turns of a list, or of a string, which is one turn."""
    if isinstance(value, str):
        value = [{"role": role, "content": value}]
    try:
        return checked_turns(value)
    except BadRowError as error:
        reason, detail = error.args
        raise BadRowError(reason, f'"{name}": {detail}') from None


def _holds(turns: Sequence[Message], prompt: Sequence[Message]) -> bool:
    """True if the turns of an answer repeat those of the prompt."""
    begins = range(len(turns) - len(prompt) + 1)
    return any(list(turns[begin : begin + len(prompt)]) == list(prompt) for begin in begins)


def _shared_text(chosen: str, rejected: str) -> str:
    """Begin that two texts share, before the white space of the first word in which they differ."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    while shared and not chosen[shared - 1].isspace():
        shared -= 1
    return chosen[: max(0, shared - 1)]


def _refuse_useless(chosen: str, rejected: str) -> None:
    if chosen == rejected:
        raise BadRowError(BAD_PAIR, "both answers are equal, so that none is preferred; remove the pair")
    for name, answer in zip(FIELDS[1:], (chosen, rejected), strict=True):
        if not answer.strip():
            raise BadRowError(BAD_PAIR, f"{name} has no text after the prompt; remove the pair")
