"""Record of the data files that one rank prepares before training, and the check of token files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from nxtrain.common.errors import DataError
from nxtrain.common.io.bucket import BucketPath
from nxtrain.common.io.object_store import location_of
from nxtrain.data.mixture import Mixture
from nxtrain.data.samples import FileSamples
from nxtrain.data.storage import RemoteFile, cache_folder, open_file
from nxtrain.data.teacher import open_teacher
from nxtrain.data.tokenization import load_tokenizer

if TYPE_CHECKING:
    from nxtrain.config.schema import DataConfig


class Prepared(BaseModel):
    """Record of a run's prepared data files.

    Attributes:
        train: Path or address of the corpus or the token file.
        validation: File of the held-out tokens; None if no text is held out.
        tokenizer: The `tokenizer.json` that made the ids; None for ids of unknown origin.
        tokenizer_origin, end_of_text, end_id, trained, skipped: As in `nxtrain.data.dataset.Data`.
        fingerprint: Identity of the files' content.
        probe: Digests of the checked files: of samples of their ids, or of the corpora.
        skipped: Skipped files, with the reason.
    """

    model_config = ConfigDict(frozen=True)

    train: str
    validation: Path | None
    tokenizer: Path | None
    tokenizer_origin: str = ""
    end_of_text: str = ""
    end_id: int | None = None
    trained: bool = False
    fingerprint: str
    probe: str = ""
    skipped: tuple[str, ...] = ()


def prepare_tokens(config: DataConfig, seq_len: int, vocab_size: int) -> Prepared:
    """Check the token files of a run, which need no preparation."""
    names = config.mixture or (config.path,)
    contents, probes = zip(*(_checked_table(config, name, seq_len, vocab_size) for name in names), strict=True)
    identity: list[object] = [*contents]
    if config.teacher:
        file = open_file(location_of(config.teacher), cache_folder(config))
        teacher = open_teacher(file, seq_len=seq_len, k=config.teacher_k)
        content = file.tag if isinstance(file, RemoteFile) else teacher.digest()
        identity += [content, config.teacher_k, config.teacher_weight]
        probes = (*probes, teacher.probe())
    if config.mixture:
        identity.append(Mixture.of(config.mixture, config.weights).shares)
    tokenizer_path = end_id = None
    if config.tokenizer:
        tokenizer = load_tokenizer(Path(config.tokenizer).expanduser(), vocab_size)
        tokenizer_path, end_id = tokenizer.path, tokenizer.end_id
    return Prepared(
        train=names[0],
        validation=None,
        tokenizer=tokenizer_path,
        end_id=end_id,
        fingerprint=digest(*identity),
        probe=" ".join(probes),
    )


def digest(*parts: object) -> str:
    """Short hash of several values, for file names."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _checked_table(config: DataConfig, name: str, seq_len: int, vocab_size: int) -> tuple[str, str]:
    """Check a token file; return the identity of its content, and a digest of a sample of rows.

    Of an object in object storage, only the sample is read.
    """
    path = location_of(name)
    try:
        file = open_file(path, cache_folder(config))
    except DataError as error:
        if isinstance(path, BucketPath) or path.exists():
            raise
        relative = "" if path.is_absolute() else f" (relative to {Path.cwd()})"
        raise DataError(
            f"{error}. data.source=tokens reads rows of train.seq_len + 1 = {seq_len + 1} integer ids below "
            f"{vocab_size} from a .npy file: numpy.save({str(path)!r}, rows){relative}, or set data.path to yours"
        ) from error
    samples = FileSamples(file, seq_len=seq_len, vocab_size=vocab_size)
    identity = file.tag if isinstance(file, RemoteFile) else samples.digest()
    return identity, samples.probe()
