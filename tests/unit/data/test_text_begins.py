"""Documents have the ids that transformers gives their whole text, also after a prompt and from section to section.

Some tokenizers put a token or a space before a text. A document has them once, at its beginning.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from nxtrain.common.vocab import ID_MASK, PROMPT_BIT
from nxtrain.data.arrow import columns, rows
from nxtrain.data.arrow.prepared import PreparedCorpus
from tests.support.conversations import LLAMA2, MISTRAL
from tests.support.corpora import prepare
from tests.unit.data.conftest import open_at

TEXTS = [
    "What is snow? Frozen water. And ice too\nQuestion: what is rain?\nAnswer: falling water",
    "[INST] hi there [/INST] Hello you; water water snow is 12 or so",
] * 3
BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
NAMES = [UNKNOWN, BEGIN, END]


def _bpe() -> Tokenizer:
    return Tokenizer(models.BPE(unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True))


def _with_prepend() -> Tokenizer:
    tokenizer = _bpe()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return tokenizer


def _with_metaspace(scheme: str) -> Tokenizer:
    tokenizer = _bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=scheme == "always")
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace()])
    return tokenizer


def _byte_level(adds_space: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    return tokenizer


MAKERS: Mapping[str, Callable[[], Tokenizer]] = {
    "prepend": _with_prepend,
    "first": lambda: _with_metaspace("first"),
    "always": lambda: _with_metaspace("always"),
    "never": lambda: _with_metaspace("never"),
    "unigram": _unigram,
    "bytes after a space": lambda: _byte_level(True),
    "bytes": lambda: _byte_level(False),
}


def write_kind(folder: Path, kind: str, *, template: str = "", begins: bool = True, takes_spaces: bool = False) -> Path:
    """Write a tokenizer of a kind of `MAKERS`.

    Args:
        template: Chat template.
        begins: The tokenizer puts its token `BEGIN` before each text.
        takes_spaces: The token `BEGIN` takes in the white space after it.
    """
    tokenizer = MAKERS[kind]()
    trainer: trainers.Trainer
    if kind.startswith("bytes"):
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=330, special_tokens=NAMES, show_progress=False, initial_alphabet=alphabet
        )
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "unigram":
        trainer = trainers.UnigramTrainer(
            vocab_size=100,
            special_tokens=NAMES,
            unk_token=UNKNOWN,
            show_progress=False,
            initial_alphabet=["\u2581", "\n"],
        )
        tokenizer.decoder = decoders.Metaspace()
    else:
        names = [*NAMES, *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=names, show_progress=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    tokenizer.train_from_iterator(TEXTS, trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in NAMES]
    content["added_tokens"][NAMES.index(BEGIN)]["rstrip"] = takes_spaces
    tokenizer = Tokenizer.from_str(json.dumps(content))
    if begins:
        named = [(BEGIN, NAMES.index(BEGIN))]
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=named)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BEGIN, "eos_token": END, "unk_token": UNKNOWN}
    if template:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


KINDS = tuple(MAKERS)
VOCABULARY = 1000
ZEPHYR = """{% for m in messages %}{{ m.role + ':\n' + m.content + eos_token + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"""
SPECIAL_LAST = """{% for m in messages %}{{ bos_token + m.content + eos_token }}{% endfor %}
{%- if add_generation_prompt %}{{ bos_token }}{% endif %}"""
PHI = """{% for m in messages %}{{ bos_token + '\n' + m.content + eos_token }}{% endfor %}
{%- if add_generation_prompt %}{{ bos_token + '\n' }}{% endif %}"""
WORDS = ("snow", "water", " ", "is", "?", "\n", "12", "'s", "Answer:", "\u2603", "  ")


def drawn_text(rng: Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def peer(folder: Path) -> PreTrainedTokenizerFast:
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **config)


def prepared(folder: Path, name: str, lines: Sequence[object], **options: Any) -> list[tuple[list[int], int]]:
    """Ids of each document, and the number of its ids that are not targets."""
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    prepare(source, out=folder / f"{name}.arrow", tokenizer=folder / "tokenizer", **options)
    corpus = PreparedCorpus(folder / f"{name}.arrow")
    numbers = range(len(corpus))
    return [(corpus.ids(number).tolist(), corpus.prompt(number, corpus.content(number))) for number in numbers]


def compare(theirs: PreTrainedTokenizerFast, ids: Sequence[int], whole: Sequence[int], prompt: Sequence[int]) -> bool:
    """Compare a document with the ids of its whole text, if these begin with those of the prompt; else its text."""
    if [*whole[: len(prompt)]] == [*prompt]:
        assert [*ids] == [*whole]
        return True
    assert theirs.decode(ids) == theirs.decode(whole)
    return False


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_and_answers_have_the_ids_of_transformers(kind: str, begins: bool, tmp_path: Path) -> None:
    theirs, rng = peer(write_kind(tmp_path / "tokenizer", kind, begins=begins)), Random(kind)
    texts = [f"snow{drawn_text(rng, 4)}" for _ in range(20)]
    end = theirs.convert_tokens_to_ids(END)
    for text, (ids, _) in zip(texts, prepared(tmp_path, "a", [{"text": text} for text in texts]), strict=True):
        assert ids == [*theirs(text)["input_ids"], end]
    pairs = [(f"{drawn_text(rng, 3)}{rng.choice(('', ':', ' ', chr(10)))}", drawn_text(rng, 3)) for _ in range(60)]
    pairs = [(prompt, f"{answer}.") for prompt, answer in pairs if prompt]
    lines = [{"prompt": prompt, "text": answer} for prompt, answer in pairs]
    num_equal = 0
    for (prompt, answer), (ids, num_prompt) in zip(pairs, prepared(tmp_path, "b", lines, prompt="prompt"), strict=True):
        before = theirs(prompt)["input_ids"]
        num_equal += compare(theirs, ids, [*theirs(prompt + answer)["input_ids"], end], before)
        assert ids[:num_prompt] == before
    assert num_equal > len(pairs) / 3


@pytest.mark.parametrize("template", [LLAMA2, MISTRAL, ZEPHYR, SPECIAL_LAST, PHI])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_of_conversations_have_the_ids_of_transformers(kind: str, template: str, tmp_path: Path) -> None:
    folder = write_kind(tmp_path / "tokenizer", kind, template=template, takes_spaces=template == PHI)
    theirs, rng = peer(folder), Random(kind)
    talks = []
    for _ in range(20):
        roles = ("user", "assistant") * rng.randint(1, 2)
        talks.append([{"role": role, "content": f"{drawn_text(rng, 3)}."} for role in roles])
    documents = iter(prepared(tmp_path, "a", [{"messages": talk} for talk in talks], chat=True, field="messages"))
    num_equal = 0
    for talk in talks:
        for number in range(1, len(talk), 2):
            prompt = theirs.apply_chat_template(
                talk[:number], add_generation_prompt=True, tokenize=True, return_dict=False
            )
            whole = theirs.apply_chat_template(talk[: number + 1], tokenize=True, return_dict=False)
            whole = whole[: len(whole) - whole[::-1].index(theirs.eos_token_id)]
            ids, num_prompt = next(documents)
            num_equal += compare(theirs, ids, whole, prompt)
            assert ids[:num_prompt] == prompt
    assert num_equal


@pytest.mark.parametrize("kind", KINDS)
def test_sections_of_a_text_are_one_text(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text is encoded in sections, and a text file is read in sections."""
    monkeypatch.setattr(columns, "SECTION_CHARS", 64)
    monkeypatch.setattr(rows, "SECTION_BYTES", 200)
    monkeypatch.setattr(rows.split_sections, "__defaults__", (200,))
    theirs = peer(write_kind(tmp_path / "tokenizer", kind))
    rng = Random(kind)
    text = "".join(f"snow is {rng.choice(('water', 'rain', 'ice'))} or so\n" for _ in range(100))
    ((ids, _),) = prepared(tmp_path, "a", [{"text": text}])
    whole = theirs.decode(theirs(text)["input_ids"])
    assert theirs.decode(ids[:-1]) == whole
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text(text, encoding="utf-8")
    config: dict[str, Any] = {
        "source": "text",
        "path": str(tmp_path / "text"),
        "tokenizer": str(tmp_path / "tokenizer"),
    }
    data = open_at(tmp_path, seq_len=1, vocab_size=VOCABULARY, validation_fraction=0.0, **config)
    stream = data.train.rows(np.arange(data.train.num_rows))
    assert theirs.decode([stream[0, 0] & ID_MASK, *(stream[:-1, 1] & ID_MASK)]) == whole


@pytest.mark.parametrize("kind", ["prepend", "bytes"])
def test_a_corpus_of_text_has_the_ids_of_a_corpus_of_ids(kind: str, tmp_path: Path) -> None:
    write_kind(tmp_path / "tokenizer", kind)
    lines = [{"prompt": "What is snow? " * (number % 2), "text": f"water {number}"} for number in range(8)]
    given = [[*map(int, ids)] for ids, _ in prepared(tmp_path, "ids", lines, prompt="prompt")]
    prepare(tmp_path / "ids.jsonl", out=tmp_path / "text.arrow", prompt="prompt")
    config: dict[str, Any] = {
        "source": "arrow",
        "path": str(tmp_path / "text.arrow"),
        "tokenizer": str(tmp_path / "tokenizer"),
    }
    found = open_at(tmp_path, seq_len=8, vocab_size=VOCABULARY, validation_fraction=0.0, **config)
    (documents,) = found.source.source.documents()  # type: ignore[attr-defined]
    numbers = range(len(documents.corpus))
    contents = [documents.corpus.content(number) for number in numbers]
    lengths = [documents.corpus.prompt(number, content) for number, content in enumerate(contents)]
    result = [ids.astype(np.int64) for ids in documents.ids(contents, lengths)]
    assert [(ids & ~PROMPT_BIT).tolist() for ids in result] == given
    assert all(ids[0] == NAMES.index(BEGIN) for ids in given)


def test_what_a_tokenizer_adds_is_a_part_of_the_identity(tmp_path: Path) -> None:
    """A tokenizer with another end of text writes another corpus; nothing adds `UNKNOWN`."""
    folder = write_kind(tmp_path / "tokenizer", "prepend")
    first = prepared(tmp_path, "a", [{"text": "snow"}])
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": UNKNOWN}), encoding="utf-8")
    with pytest.raises(Exception, match=f"end {UNKNOWN}' here"):
        prepared(tmp_path, "a", [{"text": "snow"}])
    again = prepared(tmp_path, "a", [{"text": "snow"}], restart=True)
    assert (first[0][0][:-1], again[0][0][-1]) == (again[0][0][:-1], NAMES.index(UNKNOWN))
