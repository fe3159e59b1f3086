"""Tokenizer of a run's first weights, which were trained on its ids and no other's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from nxtrain.checkpoint import directory, mirror
from nxtrain.checkpoint.meta import Meta, fingerprint, read_meta
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
    """Tokenizer of the weights with which a run begins; None: the weights are drawn, or record no tokenizer.

    An unreadable checkpoint counts as one without a tokenizer: its error is raised when the checkpoint is loaded.

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
    """Fetch the first weights from the Hub, before ranks wait for each other; none if a checkpoint has the weights."""
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
    """Refuse data of another tokenizer than that of the Hugging Face folder whose weights are loaded.

    Args:
        folder: The Hugging Face folder; without a `tokenizer.json` nothing is refused.
        inputs: Identity of the run's data and tokenizer.
        allow_drift: Values of `checkpoint.allow_drift`.

    Raises:
        CheckpointError: The tokenizers differ.
    """
    file = folder / directory.TOKENIZER
    if not inputs.tokenizer or "tokenizer" in allow_drift or not file.is_file():
        return
    there = fingerprint([read_bytes(file)])
    if there != inputs.tokenizer:
        raise CheckpointError(
            f"the tokenizer of the data is not that of model.hf={folder}, whose weights know other ids: its "
            f"fingerprint is {there!r} there and {inputs.tokenizer!r} here. Leave data.tokenizer out to take that of "
            'the folder, or use checkpoint.allow_drift=["tokenizer"] to go on all the same'
        )


def read_known(checkpoint: Location) -> Meta:
    """Read the `meta.json` of a checkpoint.

    A conversion that recorded no tokenizer gets the fingerprint of the checkpoint's `tokenizer.json`.

    Raises:
        CheckpointError: As in `read_meta`.
    """
    meta, file = read_meta(checkpoint), checkpoint / directory.TOKENIZER
    if meta.step or meta.tokenizer_fingerprint or not file.is_file():
        return meta
    return meta.model_copy(update={"tokenizer_fingerprint": fingerprint([content_of(file)])})


def _newest(address: str) -> list[Location]:
    """Location of the checkpoint at an address, as a list; empty if there is none."""
    if not address:
        return []
    try:
        return [mirror.locate_checkpoint(address)]
    except CheckpointError:
        return []


def _of_checkpoint(checkpoint: Location, workdir: Path, origin: str) -> KnownTokenizer | None:
    file = checkpoint / directory.TOKENIZER
    try:
        meta = read_meta(checkpoint)
        if not file.is_file():
            return None
        content = content_of(file)
    except (CheckpointError, OSError):
        return None
    identity = fingerprint([content])
    if not content or meta.tokenizer_fingerprint not in {"", identity}:
        return None
    copy = workdir / f"tokenizer-of-weights-{identity}.json"
    if not copy.exists():
        with replacing(copy) as out:
            out.write(content)
    return KnownTokenizer(copy, origin, meta.end_of_text)


def _of_hf(folder: Path, allow_drift: Iterable[str]) -> KnownTokenizer | None:
    file = folder / directory.TOKENIZER
    if file.is_file():
        return KnownTokenizer(file, f"model.hf={folder}")
    if "tokenizer" in allow_drift:
        return None
    others = ", ".join(sorted(path.name for path in folder.glob("*token*")))
    if others:
        others = f" (only {others})"
    raise CheckpointError(
        f"model.hf={folder} has no {directory.TOKENIZER}{others}: its weights know the "
        "ids of their own tokenizer, and one that is trained on the text would give them others. Write it there with "
        "transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR), or set data.tokenizer=DIR of the same "
        'tokenizer; checkpoint.allow_drift=["tokenizer"] trains a new one all the same'
    )
