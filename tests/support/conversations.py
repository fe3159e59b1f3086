"""Drawn conversations, chat templates of several families, and the answers that transformers finds in them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.support.corpora import write_tokenizer

VOCABULARY = 320

Talk = list[dict[str, str]]


@dataclass(frozen=True)
class Family:
    """Chat template of a family, after the one that its models are released with."""

    template: str
    bos: str
    eos: str
    others: tuple[str, ...] = ()
    ends_outside: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.bos, self.eos, *self.others)))

    @property
    def has_blocks(self) -> bool:
        """True for a template that marks answers."""
        return "endgeneration" in self.template


LLAMA2 = """{% for m in messages -%}
{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}
{%- endfor %}"""

MISTRAL = """{{ bos_token }}{% for m in messages -%}
{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}"""

LLAMA3 = """{{ bos_token }}{% for m in messages -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

CHATML = """{% for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN = """{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN_BLOCKS = """{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' -%}
{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

CHATML_BLOCKS = """{% for m in messages -%}
{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' %}
    {%- generation -%}
        {{ m.content }}
    {%- endgeneration -%}
{%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

_IM = ("<|endoftext|>", "<|im_end|>", ("<|im_start|>",))
_HEADER = ("<|start_header_id|>", "<|end_header_id|>")

FAMILIES = {
    "llama2": Family(LLAMA2, "<s>", "</s>"),
    "mistral": Family(MISTRAL, "<s>", "</s>"),
    "llama3": Family(LLAMA3, "<|begin_of_text|>", "<|eot_id|>", _HEADER),
    "chatml": Family(CHATML, *_IM),
    "qwen": Family(QWEN, *_IM),
    "qwen with blocks": Family(QWEN_BLOCKS, *_IM),
    "chatml with blocks": Family(CHATML_BLOCKS, *_IM, ends_outside=True),
}


@dataclass(frozen=True)
class Answered:
    """Tokens of a conversation up to the end of an answer."""

    ids: tuple[int, ...]
    begin: int


def write_family(folder: Path, family: Family) -> PreTrainedTokenizerFast:
    """Write a tokenizer with a family's tokens and template, and load it as transformers does."""
    write_tokenizer(folder, VOCABULARY - len(family.tokens))
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in family.tokens])
    tokenizer.save(file)
    config = {"bos_token": family.bos, "eos_token": family.eos, "chat_template": family.template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return PreTrainedTokenizerFast(tokenizer_file=file, **config)


def drawn_talks(rng: Random, number: int, *, most_exchanges: int = 3) -> list[Talk]:
    """Conversations of several questions and answers; each turn begins with a word of its own, so that all differ."""
    talks = []
    for talk in range(number):
        turns: Talk = []
        for exchange in range(rng.randint(1, most_exchanges)):
            for role in ("user", "assistant"):
                own = "".join(chr(ord("a") + int(digit)) for digit in f"{talk}{exchange}{len(role)}")
                words = [rng.choice(("snow", "document", "and", "\u2603", "x\ny", "user", "end")) for _ in range(3)]
                turns.append({"role": role, "content": " ".join([own, *words[: rng.randint(0, 3)]])})
        talks.append(turns)
    return talks


def answers_of(tokenizer: PreTrainedTokenizerFast, family: Family, talk: Talk) -> list[Answered]:
    """Answers of a conversation, in the tokens of the whole conversation as transformers writes it.

    Templates that mark answers give them by `return_assistant_tokens_mask`. In others, an answer begins behind the
    generation prompt. Each answer ends with the eos.
    """
    eos = tokenizer.convert_tokens_to_ids(family.eos)
    if family.has_blocks:
        result = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = list(result["input_ids"]), result["assistant_masks"]
        begins = [offset for offset in range(len(ids)) if mask[offset] and not (offset and mask[offset - 1])]
        ends = [next(offset for offset in range(begin, len(ids)) if ids[offset] == eos) + 1 for begin in begins]
        for begin, end in zip(begins, ends, strict=True):
            assert sum(mask[begin:end]) == end - begin - family.ends_outside
        assert sum(mask) == sum(end - begin - family.ends_outside for begin, end in zip(begins, ends, strict=True))
        return [Answered(tuple(ids[:end]), begin) for begin, end in zip(begins, ends, strict=True)]
    whole = tokenizer.apply_chat_template(talk, tokenize=False)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids, starts = list(encoded["input_ids"]), [start for start, _ in encoded["offset_mapping"]]
    answers = []
    for number, turn in enumerate(talk):
        if turn["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(talk[:number], tokenize=False, add_generation_prompt=True)
            assert whole.startswith(prompt)
            begin = starts.index(len(prompt))
            answers.append(Answered(tuple(ids[: ids.index(eos, begin) + 1]), begin))
    return answers


def write_talks(path: Path, talks: Sequence[Talk]) -> Path:
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks), encoding="utf-8")
    return path


@dataclass(frozen=True)
class Piece:
    """Part of a document in a row."""

    document: Answered
    first: int
    last: int


def pieces_of_stream(documents: Sequence[Answered], seq_len: int, row: int) -> list[Piece]:
    """Pieces of a row of documents that stand end to end, over and over."""
    result, offset, begin = list[Piece](), 0, row * seq_len
    end, endless = begin + seq_len + 1, cycle(documents)
    while offset < end:
        document = next(endless)
        first, last = max(begin - offset, 0), min(end - offset, len(document.ids))
        if first < last:
            result.append(Piece(document, first, last))
        offset += len(document.ids)
    return result


def pieces_of_whole(documents: Sequence[Answered], inputs: Sequence[int]) -> list[Piece]:
    """Pieces of a row of whole documents; of two that begin alike, the longer one is there.

    The inputs lack the last token of the row, so that a document that fills the row is found without its end.
    """
    result, offset = list[Piece](), 0
    by_length = sorted(documents, key=lambda item: -len(item.ids))
    while offset < len(inputs):
        rest = tuple(inputs[offset:])
        possible = (document for document in by_length if len(document.ids) <= len(rest) + 1)
        fitting = [document for document in possible if rest[: len(document.ids)] == document.ids[: len(rest)]]
        if not fitting:
            break  # the row ends with free positions
        result.append(Piece(fitting[0], 0, len(fitting[0].ids)))
        offset += len(fitting[0].ids)
    return result
