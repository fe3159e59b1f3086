"""Tokenizer of a run's initial weights, which know only the token ids of their own tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from nxtrain.checkpoint import directory, mirror
from nxtrain.checkpoint.meta import Meta, fingerprint, read_meta
from nxtrain.checkpoint.tokenizer_files import tokenizer_files
from nxtrain.common import hf_files
from nxtrain.common.errors import CheckpointError
from nxtrain.common.io.hub import model_named
from nxtrain.common.io.object_store import Location, content_of
from nxtrain.common.io.regular import read_bytes
from nxtrain.common.run_folder import CHECKPOINTS_DIR
from nxtrain.config.model_folder import whole_folder
from nxtrain.config.schema import RunConfig
from nxtrain.data.storage import replacing
from nxtrain.data.tokenization import KnownTokenizer
from nxtrain.train.compatibility import RunInputs


def tokenizer_of_weights(config: RunConfig, workdir: Path) -> KnownTokenizer | None:
    """Tokenizer of a run's initial weights; None if the weights are drawn or record no tokenizer.

    An unreadable checkpoint counts as one without a tokenizer, since its error is raised when the checkpoint is loaded.

    Args:
        config: Configuration of the run.
        workdir: Folder for a copy of the tokenizer, since the checkpoint may be deleted during the run.

    Raises:
        CheckpointError: The Hugging Face folder of the weights has no `tokenizer.json`.
    """
    resume = config.checkpoint.resume
    if resume == "auto":
        in_folder = reversed(directory.list_checkpoints(config.run.dir / CHECKPOINTS_DIR))
        for checkpoint in (*in_folder, *_newest(config.checkpoint.mirror)):
            tokenizer = _of_checkpoint(checkpoint, workdir, "")
            if tokenizer is not None:
                return tokenizer
    elif resume != "never":
        for checkpoint in _newest(resume):
            return _of_checkpoint(checkpoint, workdir, f"checkpoint.resume={resume}")
        return None
    if config.model.init == "hf":
        return _of_hf(whole_folder(config.model.hf), config.checkpoint.allow_drift)
    return None


def fetch_weights(config: RunConfig) -> None:
    """Download the initial weights from the Hub before ranks wait for each other, unless a checkpoint has them."""
    if config.model.init != "hf" or model_named(config.model.hf) is None:
        return
    resume = config.checkpoint.resume
    is_resumed = resume not in {"auto", "never"}
    if resume == "auto":
        is_resumed = bool(
            directory.list_checkpoints(config.run.dir / CHECKPOINTS_DIR) or _newest(config.checkpoint.mirror)
        )
    if config.finetune.adapts or not is_resumed:  # checkpoints of adapters do not hold the frozen weights
        whole_folder(config.model.hf)


def refuse_other(folder: Path, inputs: RunInputs, allow_drift: Iterable[str]) -> None:
    """Refuse data whose tokenizer differs from the tokenizer of the Hugging Face folder whose weights are loaded.

    Args:
        folder: The Hugging Face folder; without a `tokenizer.json` nothing is refused.
        inputs: Identity of the run's data and tokenizer.
        allow_drift: Values of `checkpoint.allow_drift`.

    Raises:
        CheckpointError: The tokenizers differ.
    """
    file = folder / hf_files.TOKENIZER
    if not inputs.tokenizer or "tokenizer" in allow_drift or not file.is_file():
        return
    there = fingerprint([read_bytes(file)])
    if there != inputs.tokenizer:
        raise CheckpointError(
            f"the tokenizer of the data differs from the tokenizer of model.hf={folder}, whose token ids the weights "
            f"know: its fingerprint is {there!r} there and {inputs.tokenizer!r} here. Leave data.tokenizer out to use "
            'the tokenizer of the folder, or set checkpoint.allow_drift=["tokenizer"] to train anyway'
        )


def read_known(checkpoint: Location) -> Meta:
    """Read the `meta.json` of a checkpoint.

    A conversion that recorded no tokenizer gets the fingerprint of the checkpoint's `tokenizer.json`.

    Raises:
        CheckpointError: As in `read_meta`.
    """
    meta, file = read_meta(checkpoint), checkpoint / hf_files.TOKENIZER
    if meta.step or meta.tokenizer_fingerprint or not file.is_file():
        return meta
    return meta.model_copy(update={"tokenizer_fingerprint": fingerprint([content_of(file)])})


def _newest(address: str) -> list[Location]:
    """Location of the checkpoint at an address, as a list; empty if there is no checkpoint."""
    if not address:
        return []
    try:
        return [mirror.locate_checkpoint(address)]
    except CheckpointError:
        return []


def _of_checkpoint(checkpoint: Location, workdir: Path, origin: str) -> KnownTokenizer | None:
    """Copy a checkpoint's tokenizer and its companions to a folder; None if the checkpoint has no valid tokenizer."""
    try:
        meta = read_meta(checkpoint)
        if not (checkpoint / hf_files.TOKENIZER).is_file():
            return None
        files = tokenizer_files(checkpoint)
    except (CheckpointError, OSError):
        return None
    content = files[hf_files.TOKENIZER]
    if not content or meta.tokenizer_fingerprint not in {"", fingerprint([content])}:
        return None
    folder = workdir / f"tokenizer-of-weights-{fingerprint(files.values())}"
    for name, copied in files.items():
        if not (folder / name).exists():
            with replacing(folder / name) as out:
                out.write(copied)
    return KnownTokenizer(folder / hf_files.TOKENIZER, origin, meta.end_of_text)


def _of_hf(folder: Path, allow_drift: Iterable[str]) -> KnownTokenizer | None:
    file = folder / hf_files.TOKENIZER
    if file.is_file():
        return KnownTokenizer(file, f"model.hf={folder}")
    if "tokenizer" in allow_drift:
        return None
    others = ", ".join(sorted(path.name for path in folder.glob("*token*")))
    if others:
        others = f" (only {others})"
    raise CheckpointError(
        f"model.hf={folder} has no {hf_files.TOKENIZER}{others}. Its weights know only the token ids of their own "
        "tokenizer, and a tokenizer trained on the text has other ids. Write the file with transformers: "
        "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR), or set data.tokenizer=DIR to a folder with the same "
        'tokenizer. checkpoint.allow_drift=["tokenizer"] trains a new tokenizer anyway'
    )
