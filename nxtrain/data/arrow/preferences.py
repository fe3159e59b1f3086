"""Conversion of preference data to documents: answers to a prompt, as strings or as turns of a conversation.

The formats are those of Hugging Face's data sets. A pair has `chosen` and `rejected`, with a `prompt`, or with a prompt
at the beginning of both. A labelled answer has `prompt`, `completion` and `label`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from nxtrain.data.arrow.chat import ChatTemplate, Message, checked_turns
from nxtrain.data.arrow.rows import INVALID_UTF8, LABELLED, MISSING_FIELD, PAIR, WRONG_TYPE, BadRowError

BAD_PAIR = "bad pair"
BAD_ANSWER = "bad answer"


class AnswerWriter:
    """Converter of pairs and of labelled answers to documents.

    Args:
        chat: Chat template for turns; None if prompts and answers are strings.
    """

    def __init__(self, chat: ChatTemplate | None) -> None:
        self._chat = chat

    def pair(self, values: Sequence[object], tools: object = None) -> Iterator[tuple[bytes, int]]:
        """Documents of a pair: the chosen answer, then the rejected one, each with the number of bytes of its prompt.

        Args:
            values: Prompt or None, then the chosen and the rejected answer.
            tools: Tools of a conversation; None for none.
        """
        for name, value in zip(PAIR, values[1:], strict=True):
            if value is None:
                raise BadRowError(MISSING_FIELD, f'no "{name}"; a pair has "chosen", "rejected" and perhaps "prompt"')
        if self._chat is not None:
            yield from self._of_turns(self._chat, values, tools)
            return
        prompt, chosen, rejected = (_text(name, value) for name, value in zip(("prompt", *PAIR), values, strict=True))
        if values[0] is None:
            prompt = _shared_text(chosen, rejected)
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        _refuse_useless(chosen, rejected)
        for answer in (chosen, rejected):
            yield (prompt + answer).encode(), len(prompt.encode())

    def labelled(self, values: Sequence[object], tools: object = None) -> Iterator[tuple[bytes, int]]:
        """Document of a labelled answer with its prompt, and the number of bytes of the prompt.

        Args:
            values: Prompt, answer, and True if the answer is desirable.
            tools: Tools of a conversation; None for none.
        """
        names = ("prompt", *LABELLED)
        for name, value in zip(names, values, strict=True):
            if value is None:
                raise BadRowError(MISSING_FIELD, f'no "{name}"; a row has "prompt", "completion" and "label"')
        if not isinstance(values[2], bool):
            raise BadRowError(WRONG_TYPE, '"label" is neither true nor false')
        if self._chat is None:
            prompt, answer = (_text(name, value) for name, value in zip(names[:2], values[:2], strict=True))
            _refuse_blank(BAD_ANSWER, {"prompt": prompt, "completion": answer})
            yield (prompt + answer).encode(), len(prompt.encode())
            return
        turns = _turns("prompt", values[0], "user")
        answers = _turns("completion", values[1], "assistant")
        if len(answers) != 1 or answers[0]["role"] != "assistant":
            raise BadRowError(
                BAD_ANSWER, f"completion has {len(answers)} turns; an answer is one turn of the assistant"
            )
        _refuse_blank(BAD_ANSWER, {"completion": answers[0]["content"]})
        yield self._chat.last_answer([*turns, *answers], tools)

    def _of_turns(self, chat: ChatTemplate, values: Sequence[object], tools: object) -> Iterator[tuple[bytes, int]]:
        prompt: list[Message] = []
        if values[0] is not None:
            prompt = _turns("prompt", values[0], "user")
        talks = []
        for name, value in zip(PAIR, values[1:], strict=True):
            turns = _turns(name, value, "assistant")
            begins = range(len(turns) - len(prompt) + 1)
            repeats_prompt = any(turns[begin : begin + len(prompt)] == prompt for begin in begins)
            if not repeats_prompt:
                turns = [*prompt, *turns]
            talks.append(turns)
        chosen, rejected = talks
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        if shared == len(chosen) == len(rejected):
            _refuse_useless("equal", "equal")
        for name, turns in zip(PAIR, talks, strict=True):
            if len(turns) != shared + 1 or turns[-1]["role"] != "assistant":
                detail = f"{name} has {len(turns) - shared} turns after the {shared} that both answers share"
                raise BadRowError(BAD_PAIR, f"{detail}; an answer is one turn of the assistant")
        _refuse_useless(chosen[-1]["content"], rejected[-1]["content"])
        for turns in talks:
            yield chat.last_answer(turns, tools)


def _text(name: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        raise BadRowError(WRONG_TYPE, f'"{name}" is a list of turns; give --chat, which applies the chat template')
    if not isinstance(value, str):
        raise BadRowError(WRONG_TYPE, f'"{name}" is not a string')
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        raise BadRowError(INVALID_UTF8, f'"{name}" holds half of a surrogate pair')
    return value


def _turns(name: str, value: object, role: str) -> list[Message]:
    """Turns of an answer, given as a list, or as a string, which is a single turn."""
    if isinstance(value, str):
        value = [{"role": role, "content": value}]
    try:
        return checked_turns(value)
    except BadRowError as error:
        reason, detail = error.args
        raise BadRowError(reason, f'"{name}": {detail}') from None


def _shared_text(chosen: str, rejected: str) -> str:
    """Common prefix of two texts, up to the white space before the first word that differs."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    while shared and not chosen[shared - 1].isspace():
        shared -= 1
    return chosen[: max(0, shared - 1)]


def _refuse_useless(chosen: str, rejected: str) -> None:
    if chosen == rejected:
        raise BadRowError(BAD_PAIR, "both answers are equal, so that none is preferred; remove the pair")
    _refuse_blank(BAD_PAIR, {"chosen": chosen, "rejected": rejected})


def _refuse_blank(reason: str, texts: Mapping[str, str]) -> None:
    for name, text in texts.items():
        if not text.strip():
            raise BadRowError(reason, f"{name} has no text; remove the row")
