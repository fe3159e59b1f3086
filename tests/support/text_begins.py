"""Tokenizers that put a space or a token before each text, as those of Llama 2, Mistral and others do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

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
