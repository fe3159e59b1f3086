"""Tokenizer of a checkpoint, with its companions from a Hugging Face folder, such as the chat template."""

from __future__ import annotations

from nxtrain.common.hf_files import COMPANIONS, TOKENIZER
from nxtrain.common.io.object_store import Location, content_of


def tokenizer_files(folder: Location, tokenizer: str = TOKENIZER) -> dict[str, bytes]:
    """Read a tokenizer and the companions in a folder, such as the chat template.

    Args:
        tokenizer: Name of the tokenizer's file.

    Returns:
        The contents by name, with `tokenizer.json` as the name of the tokenizer.
    """
    files = {TOKENIZER: content_of(folder / tokenizer)}
    for name in COMPANIONS:
        if name != TOKENIZER and (folder / name).is_file():
            files[name] = content_of(folder / name)
    return files
