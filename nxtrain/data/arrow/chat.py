"""Conversion of conversations to documents by a tokenizer's chat template, one document for each answer.

The template, its functions and its settings follow `apply_chat_template` in transformers. The tests compare every text
and id with transformers.

Source: `src/transformers/utils/chat_template_utils.py` of transformers 4.57.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from nxtrain.common.errors import ConfigError, cause_of
from nxtrain.common.hf_files import CHAT_TEMPLATE, TOKENIZER_CONFIG
from nxtrain.common.io.regular import read_bytes
from nxtrain.data.arrow.rows import (
    BROKEN_JSON,
    INVALID_UTF8,
    MAX_DOCUMENT_BYTES,
    MISSING_FIELD,
    TOO_LONG,
    TOOLS,
    WRONG_TYPE,
    BadRowError,
)
from nxtrain.data.tokenization import TextTokenizer

BAD_CONVERSATION = "bad conversation"
SPECIAL_TOKEN = "special token"

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DATE = datetime(2024, 7, 26)
"""Date that templates write, so that a corpus does not depend on the day; the one of Llama 3.1 without a clock."""

_ANSWER = "\ufdd0"
"""Mark before the text of a `{% generation %}` block: a Unicode noncharacter, which no interchanged text has."""


class GenerationBlocks(Extension):
    """Jinja extension for `{% generation %}` blocks of a chat template, which mark the texts of answers."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares them so

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return _ANSWER + caller()


class ChatTemplate:
    """Chat template of a tokenizer, from its folder.

    Args:
        tokenizer: Tokenizer with a `chat_template.jinja` or `tokenizer_config.json` next to its file.

    Attributes:
        digest: Hash of the template and of its special tokens.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        config = _config(tokenizer.path.with_name(TOKENIZER_CONFIG))
        text = _template_text(tokenizer.path, config)
        self._names: dict[str, str] = {}
        for name in ("bos_token", "eos_token", "pad_token"):
            declared = config.get(name)
            if isinstance(declared, dict):  # by an object with its text
                declared = declared.get("content")
            if name in config:
                self._names[name] = declared if isinstance(declared, str) else ""
        self._template = _compiled(text, tokenizer.path.parent)
        self._has_blocks = _GENERATION.search(text) is not None
        self._end = tokenizer.end
        tokens = tokenizer.tokenizer.get_added_tokens_decoder().values()
        special = [token.content for token in tokens if token.special]
        self._special: re.Pattern[str] | None = None
        if special:
            self._special = re.compile("|".join(map(re.escape, special)))
        content = json.dumps([text, self._names], sort_keys=True)
        self.digest = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    def documents(self, messages: object, tools: object = None) -> Iterator[tuple[bytes, int]]:
        """Documents of a conversation: all turns up to each answer, with the number of prompt bytes before the answer.

        An answer begins with its first `{% generation %}` block. In a template without such blocks, it begins after the
        generation prompt. A document ends before the end of text, which the column adds.
        """
        turns, described = checked_turns(messages), _checked_tools(tools)
        self._refuse_special(turns, described)
        for number, turn in enumerate(turns):
            if turn["role"] == "assistant":
                yield self._document(turns, number, described)

    def last_answer(self, turns: Sequence[Message], tools: object = None) -> tuple[bytes, int]:
        """Document that ends with the last turn, an answer, with the number of prompt bytes; see `documents`."""
        described = _checked_tools(tools)
        self._refuse_special(turns, described)
        return self._document(turns, len(turns) - 1, described)

    def _document(self, turns: Sequence[Message], number: int, tools: Tools | None) -> tuple[bytes, int]:
        prompt = self._render(turns[:number], tools, add_generation_prompt=True)
        text = self._render(turns[: number + 1], tools, add_generation_prompt=False)
        if self._has_blocks:
            parts = text.split(_ANSWER)
            num_earlier = prompt.count(_ANSWER) + 1
            prompt, answer = "".join(parts[:num_earlier]), "".join(parts[num_earlier:])
            if len(parts) == num_earlier:
                detail = (
                    f"the template writes turn {number + 1} without a generation block, so the answer is not marked"
                )
                raise BadRowError(BAD_CONVERSATION, detail)
        elif text.startswith(prompt):
            answer = text[len(prompt) :]
        else:
            detail = (
                f"the template writes turn {number + 1} differently from its prompt, so the answer cannot be split off"
            )
            raise BadRowError(BAD_CONVERSATION, detail)
        bare = answer.rstrip()
        if bare.endswith(self._end):
            answer = bare.removesuffix(self._end)
        document = (prompt + answer).encode()
        if len(document) > MAX_DOCUMENT_BYTES:
            raise BadRowError(TOO_LONG, f"{len(document):,} bytes with the template; shorten the conversation")
        return document, len(prompt.encode())

    def _render(self, turns: Sequence[Message], tools: Tools | None, *, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=turns, tools=tools, documents=None, add_generation_prompt=add_generation_prompt, **self._names
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise BadRowError(BAD_CONVERSATION, f"the chat template refuses it: {error}") from error

    def _refuse_special(self, turns: Sequence[Message], tools: Tools | None) -> None:
        """Raise a BadRowError if a text of a turn or a tool contains a special token or an answer mark."""
        named: list[tuple[str, object]] = [(f"turn {number}", turn) for number, turn in enumerate(turns, 1)]
        for name, value in [*named, (f'"{TOOLS}"', tools)]:
            for text in _texts_of(value):
                if self._has_blocks and _ANSWER in text:
                    raise BadRowError(SPECIAL_TOKEN, f"{name} holds the noncharacter U+FDD0; remove it")
                spelled = self._special.search(text) if self._special else None
                if spelled:
                    raise BadRowError(SPECIAL_TOKEN, f"{name} contains the special token {spelled[0]!r}; remove it")


def with_special_tokens(tokenizer: TextTokenizer) -> TextTokenizer:
    """Copy of a tokenizer that encodes special tokens in a text as such, and adds none: the template writes them."""
    copy = Tokenizer.from_str(tokenizer.tokenizer.to_str())
    copy.encode_special_tokens = False
    return replace(tokenizer, tokenizer=copy, begin=())


def _config(file: Path) -> dict[str, Any]:
    config: object = {}
    try:
        if file.exists():
            config = json.loads(read_bytes(file))
    except (OSError, RecursionError, ValueError) as error:
        raise ConfigError(f"--chat: {file} cannot be read: {cause_of(error)}") from error
    return config if isinstance(config, dict) else {}


def _template_text(tokenizer: Path, config: Mapping[str, Any]) -> str:
    """Text of the chat template: from its own file, else from the tokenizer's configuration."""
    file = tokenizer.with_name(CHAT_TEMPLATE)
    if file.exists():
        try:
            return read_bytes(file).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat: {file} cannot be read: {cause_of(error)}") from error
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise ConfigError(
            f"--chat: {tokenizer.parent} has no chat template: neither {CHAT_TEMPLATE} nor chat_template in "
            f"{TOKENIZER_CONFIG}; give --tokenizer the folder of a model that was tuned on conversations"
        )
    return template


def _compiled(text: str, folder: Path) -> Template:
    extensions = ["jinja2.ext.loopcontrols", GenerationBlocks]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # without the escapes for HTML
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _DATE.strftime
    try:
        return environment.from_string(text)
    except TemplateError as error:
        raise ConfigError(f"--chat: the chat template of {folder} is not a template: {error}") from error


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def checked_turns(messages: object) -> list[Message]:
    """Turns of a conversation, each with a role and a text; raise a BadRowError for anything else."""
    if messages is None:
        raise BadRowError(MISSING_FIELD, "no conversation; name its field with --field")
    if not isinstance(messages, list):
        raise BadRowError(WRONG_TYPE, 'the conversation is not a list such as [{"role": "user", "content": "..."}]')
    for number, turn in enumerate(messages, 1):
        if not isinstance(turn, dict):
            raise BadRowError(WRONG_TYPE, f"turn {number} is not an object with role and content")
        for key in ("role", "content"):
            if not isinstance(turn.get(key), str):
                raise BadRowError(MISSING_FIELD, f'turn {number} has no text in "{key}"')
        if any("\ud800" <= letter <= "\udfff" for letter in "".join(_texts_of(turn))):
            raise BadRowError(INVALID_UTF8, f"turn {number} holds half of a surrogate pair")
    return messages


def _checked_tools(tools: object) -> Tools | None:
    """Tools of a conversation, given as a list or as JSON text; None for none. Raise a BadRowError for others."""
    listed: object = tools
    if isinstance(tools, str) and tools:
        try:
            listed = json.loads(tools)
        except (RecursionError, ValueError) as error:
            raise BadRowError(BROKEN_JSON, f'"{TOOLS}" is not JSON: {cause_of(error)}') from error
    if not listed:
        return None
    if not isinstance(listed, list) or not all(isinstance(tool, dict) for tool in listed):
        raise BadRowError(WRONG_TYPE, f'"{TOOLS}" is not a list of objects such as [{{"type": "function", ...}}]')
    if any("\ud800" <= letter <= "\udfff" for letter in "".join(_texts_of(listed))):
        raise BadRowError(INVALID_UTF8, f'"{TOOLS}" holds half of a surrogate pair')
    return listed


def _texts_of(value: object) -> Iterator[str]:
    """All texts of a turn, also of its calls of tools, which a template may write."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _texts_of(item)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from _texts_of(item)
