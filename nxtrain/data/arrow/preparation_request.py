"""Arguments of a corpus preparation, and the rules for their combinations."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from nxtrain.common.errors import ConfigError
from nxtrain.common.io.object_store import Location
from nxtrain.data.arrow.columns import PROMPT
from nxtrain.data.arrow.hub_files import HubAddress, HubFiles
from nxtrain.data.arrow.rows import LABELLED, PAIR
from nxtrain.data.arrow.sources import Source

MIN_SHARD_BYTES = 1 << 16

OnBad = Literal["stop", "skip", "skip binary"]

_EXAMPLES = {
    "--prompt": '{"prompt": "...", "text": "..."}',
    "--chat": '{"messages": [{"role": "user", "content": "..."}, ...]}',
    "--pairs": '{"prompt": "...", "chosen": "...", "rejected": "..."}',
    "--labels": '{"prompt": "...", "completion": "...", "label": true}',
}


@dataclass(frozen=True)
class PreparationRequest:
    """Arguments of a corpus preparation.

    Args:
        sources: Files and folders, objects and bucket prefixes, addresses of the Hub or their downloaded files.
        out: File to write, or folder of shards; its name ends in `.arrow`.
        lines: Each line of a text file is a document.
        only: Pattern that the names of a folder's files must match; empty for all files.
        tokenizer: Tokenizer that converts the text to ids; None for a corpus of text.
        shard_bytes: Size at which a shard ends; 0 for one file.
        restart: Delete an earlier result or unfinished work under the name of `out`.
        prompt: Field of the prompts, which precede the documents and are not targets; empty for none.
        chat: The field has conversations, which the tokenizer's chat template converts to text.
        pairs: Rows are pairs of answers, as strings, or as turns with `chat`.
        labels: Rows are labelled answers, as strings, or as turns with `chat`.
        mixed: A folder may contain text files next to other formats.
        sections: Text files are read in sections of at most `SECTION_BYTES`, which continue each other.
    """

    sources: Sequence[Location | HubAddress | HubFiles]
    out: Path
    field: str = "text"
    lines: bool = False
    only: str = ""
    tokenizer: Path | None = None
    shard_bytes: int = 0
    on_bad: OnBad = "stop"
    restart: bool = False
    prompt: str = ""
    chat: bool = False
    mixed: bool = False
    sections: bool = False
    pairs: bool = False
    labels: bool = False


def check_output(request: PreparationRequest) -> None:
    """Raise a ConfigError if the name, the place or the shard size of the output is invalid."""
    if request.out.suffix != ".arrow":
        raise ConfigError(f"--out {request.out} has another ending than .arrow; call it {request.out}.arrow")
    if 0 < request.shard_bytes < MIN_SHARD_BYTES:
        raise ConfigError(f"--shard-bytes {request.shard_bytes} is below {MIN_SHARD_BYTES:,}; give more")
    out = Path(os.path.realpath(request.out))
    for source in request.sources:
        if not isinstance(source, Path):
            continue
        real = Path(os.path.realpath(source))  # `Path.resolve` fails for a link to itself
        if out == real or (source.is_dir() and out.is_relative_to(real)):
            raise ConfigError(
                f"--out {request.out} lies in the source {source}, and would be read as a part of it; move it"
            )


def check_fields(request: PreparationRequest, sources: Sequence[Source]) -> None:
    """Raise a ConfigError if prompts or conversations are requested from sources without fields."""
    if request.pairs and request.labels:
        raise ConfigError("--pairs and --labels: a row has two answers, or one with a label; give one of the two")
    for name, is_given, values in (("--pairs", request.pairs, PAIR), ("--labels", request.labels, LABELLED)):
        if is_given and (request.prompt or request.field != "text"):
            raise ConfigError(f"{name} reads the fields {', '.join((PROMPT, *values))}; leave --prompt and --field out")
        if is_given and request.tokenizer is None:
            raise ConfigError(f"{name} writes answers as ids; give the folder of their tokenizer with --tokenizer")
    if request.chat and request.prompt:
        raise ConfigError("--chat and --prompt: the turns before an answer are its prompt; give one of the two")
    if request.chat and request.tokenizer is None:
        raise ConfigError(
            "--chat converts conversations with a tokenizer's template, to ids; give its folder with --tokenizer"
        )
    if request.prompt == request.field:
        raise ConfigError(f"--prompt {request.prompt} and --field {request.field} are one field; name two")
    given = {"--pairs": request.pairs, "--labels": request.labels, "--chat": request.chat, "--prompt": request.prompt}
    option = next((name for name, value in given.items() if value), "")
    if not option:
        return
    for source in sources:
        if source.kind == "text":
            raise ConfigError(
                f"{option} names a field, and {source.path} is text without fields; "
                f"give JSON lines such as {_EXAMPLES[option]}, Parquet or Arrow"
            )
