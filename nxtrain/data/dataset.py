"""Opening of the data of the `[data]` section: one rank prepares the files, and all ranks read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nxtrain.common.errors import DataError, LostPeerError, refused
from nxtrain.common.io.object_store import location_of
from nxtrain.common.io.regular import read_bytes
from nxtrain.data.batch_source import BatchSource, TokenRows
from nxtrain.data.mixture import MixedSamples, Mixture
from nxtrain.data.prepare import Prepared, digest, prepare_tokens
from nxtrain.data.samples import AnswerRows, EndedSamples, FileSamples, Samples
from nxtrain.data.storage import cache_folder, open_file, replacing
from nxtrain.data.teacher import DistillationSamples, open_teacher
from nxtrain.data.tokenization import KnownTokenizer

if TYPE_CHECKING:
    from nxtrain.config.schema import DataConfig
    from nxtrain.data.arrow.token_stream import StreamSamples


@dataclass(frozen=True)
class Data:
    """Training and validation data of a run.

    Attributes:
        source: Training rows, or documents that are packed into rows.
        validation: Held-out rows; None if there are none, as always for `source=tokens`.
        tokenizer: The `tokenizer.json` that made the ids; None for token files without a tokenizer.
        fingerprint: Identity of the rows: runs with equal fingerprints and seeds train on equal batches.
        tokenizer_origin: Origin of a tokenizer that belongs to the initial weights; else empty.
        end_of_text: The tokenizer's token that ends a document; empty if unknown.
        end_id: Id of this token; None if unknown.
        trained: The tokenizer was trained on this data.
        skipped: Skipped files, with the reason.
    """

    source: BatchSource
    validation: Samples | None
    tokenizer: Path | None
    fingerprint: str
    tokenizer_origin: str = ""
    end_of_text: str = ""
    end_id: int | None = None
    trained: bool = False
    skipped: tuple[str, ...] = ()

    @property
    def train(self) -> Samples:
        """Training rows, for data that is packed into rows before training."""
        assert isinstance(self.source, TokenRows)
        return self.source.samples


def open_data(  # 9 arguments: each is of another part of the run, and there is one call
    config: DataConfig,
    *,
    seq_len: int,
    vocab_size: int,
    workdir: Path,
    leader: bool,
    barrier: Callable[[], None],
    of_weights: Callable[[], KnownTokenizer | None] = lambda: None,
    validation_rows: int = 0,
    answers: AnswerRows | None = None,
) -> Data:
    """Open the data of a run; every rank calls this function at the same point.

    Args:
        config: The section [data].
        seq_len: Targets in a row.
        vocab_size: Size of the model's vocabulary.
        workdir: Folder for prepared files, which the next start reuses.
        leader: True if this rank prepares the data, which is one rank for each disk with a `workdir`.
        barrier: Waits for all ranks.
        of_weights: Returns the tokenizer of the initial weights. The leader calls it if data.tokenizer is empty.
        validation_rows: Rows that an evaluation reads from a source that is tokenized on the fly.
        answers: Row format of a preference objective; None for other objectives.

    Raises:
        DataError: Data is missing, malformed, too short or outside of the vocabulary.
        StorageError: The storage of the data fails.
        LostPeerError: The rank that prepares the data failed.
    """
    receipt = _receipt(config, seq_len, vocab_size, workdir)
    make = partial(prepare_tokens, config, seq_len, vocab_size)
    if config.source != "tokens":
        from nxtrain.data.arrow.training import prepare_corpora

        make = partial(prepare_corpora, config, seq_len, vocab_size, workdir, of_weights, validation_rows, answers)
    # The barrier is reached even if the leader fails; the other ranks would otherwise wait until they time out.
    try:
        if leader:
            try:
                receipt.unlink(missing_ok=True)  # no rank may take what an earlier start has prepared
            except OSError as error:
                raise refused(error, f"{receipt} cannot be replaced") from error
            prepared = make()
            with replacing(receipt) as file:
                file.write(prepared.model_dump_json().encode())
    finally:
        barrier()
    if not leader:
        try:
            prepared = Prepared.model_validate_json(read_bytes(receipt))
        except FileNotFoundError as error:
            raise LostPeerError("the rank that prepares the data failed; its message says why") from error

    source: BatchSource
    validation: Samples | None = None
    pairs_per_row = 0
    if answers is not None:
        pairs_per_row = answers.pairs_per_row
        source, validation = _open_answers(config, prepared, answers, seq_len=seq_len, vocab_size=vocab_size)
    elif config.source == "arrow":
        from nxtrain.data.arrow.training import open_streams

        source = open_streams(config, prepared, seq_len=seq_len, vocab_size=vocab_size)
    else:
        source = _open_rows(config, prepared, seq_len, vocab_size)
    if prepared.validation:
        validation = _open_validation(config, prepared.validation, seq_len)
    return Data(
        source,
        validation,
        prepared.tokenizer,
        digest(prepared.fingerprint, seq_len, *([pairs_per_row] if pairs_per_row else [])),
        tokenizer_origin=prepared.tokenizer_origin,
        end_of_text=prepared.end_of_text,
        end_id=prepared.end_id,
        trained=prepared.trained,
        skipped=prepared.skipped,
    )


def open_held_out(config: DataConfig, seq_len: int, vocab_size: int, workdir: Path) -> Samples | None:
    """Open the held-out rows that a run has prepared; None if the run holds out no data.

    Args:
        workdir: Folder of the prepared files; the run folder may have moved since.

    Raises:
        DataError: A prepared file is missing or unreadable.
    """
    try:
        prepared = Prepared.model_validate_json(read_bytes(_receipt(config, seq_len, vocab_size, workdir)))
    except (OSError, ValueError) as error:
        raise DataError(f"{workdir} has no data that this configuration has prepared: {error}") from error
    if not prepared.validation:
        return None
    return _open_stream(workdir / prepared.validation.name, seq_len)


def count_rows(config: DataConfig, seq_len: int, vocab_size: int, workdir: Path) -> tuple[int, Path]:
    """Count the rows of `source=tokens`, or of text that an earlier start has prepared, without verification.

    Returns:
        The number of rows, and the file that has them.
    """
    if config.source == "arrow":
        raise DataError("the rows of data.source=arrow are packed when a run starts")
    if config.source != "tokens":
        try:
            receipt = Prepared.model_validate_json(read_bytes(_receipt(config, seq_len, vocab_size, workdir)))
        except (OSError, ValueError) as error:
            raise DataError(f"no start has prepared the text in {workdir}") from error
        path = workdir / Path(receipt.train).name
        return _open_stream(path, seq_len).num_rows, path
    location = location_of(config.path)
    if not isinstance(location, Path):
        raise DataError(f"{location} is in object storage, and its rows are counted when a run starts")
    return FileSamples(open_file(location, Path()), seq_len=seq_len, vocab_size=vocab_size).num_rows, location


def _receipt(config: DataConfig, seq_len: int, vocab_size: int, workdir: Path) -> Path:
    evaluated = (config.validation_fraction, config.validation_path)
    corpora = (config.source, config.path, config.mixture, config.weights, config.tokenizer)
    taught = (config.teacher, config.teacher_k, config.teacher_weight) if config.teacher else ()
    return workdir / f"prepared-{digest(*corpora, *evaluated, seq_len, vocab_size, *taught)}.json"


def _open_stream(path: Path, seq_len: int) -> StreamSamples:
    from nxtrain.data.arrow.token_stream import StreamSamples

    return StreamSamples(path, seq_len)


def _open_validation(config: DataConfig, path: Path, seq_len: int) -> StreamSamples:
    """Open the held-out rows; raise an error if there is none."""
    validation = _open_stream(path, seq_len)
    held_out = f"holds out with data.validation_fraction={config.validation_fraction}"
    way_out = "raise the fraction, or set it to 0 to train without evaluation"
    if config.validation_path:
        held_out, way_out = f"of data.validation_path={config.validation_path} has", "give more text"
    _refuse_too_short(validation, held_out, way_out)
    return validation


def _open_rows(config: DataConfig, prepared: Prepared, seq_len: int, vocab_size: int) -> TokenRows:
    """Open the training rows of one token file, or of a mixture of several."""
    if config.source != "tokens":
        train = _open_stream(Path(prepared.train), seq_len)
        _refuse_too_short(train, "leaves for training", "add text, or lower train.seq_len")
        return TokenRows(train)
    files = [open_file(location_of(name), cache_folder(config)) for name in config.mixture or (prepared.train,)]
    probes = prepared.probe.split()
    parts: tuple[Samples, ...] = tuple(
        FileSamples(file, seq_len=seq_len, vocab_size=vocab_size, expected=probe)
        for file, probe in zip(files, probes, strict=False)
    )
    if config.doc_mask:
        assert prepared.end_id is not None, "config/check.py asks for the tokenizer"
        parts = tuple(EndedSamples(part, prepared.end_id) for part in parts)
    if config.mixture:
        return TokenRows(MixedSamples(Mixture.of(config.mixture, config.weights), parts))
    if config.teacher:
        file = open_file(location_of(config.teacher), cache_folder(config))
        teacher = open_teacher(file, seq_len=seq_len, k=config.teacher_k, expected=probes[-1])
        return TokenRows(DistillationSamples(parts[0], teacher, vocab_size=vocab_size, weight=config.teacher_weight))
    return TokenRows(parts[0])


def _open_answers(
    config: DataConfig, prepared: Prepared, answers: AnswerRows, *, seq_len: int, vocab_size: int
) -> tuple[TokenRows, Samples | None]:
    """Open the training rows of a prepared corpus of answers, and the held-out rows if any."""
    from nxtrain.data.arrow.pairs import PairSamples, check_answers
    from nxtrain.data.arrow.training import open_corpora, open_corpus

    (corpus,) = open_corpora(config, Path()).corpora
    if corpus.identity != prepared.probe:
        raise DataError(f"{corpus.path} differs from the corpus on the machine that checked it; copy it again")
    rows = partial(PairSamples, seq_len=seq_len, vocab_size=vocab_size, pairs_per_row=answers.pairs_per_row)
    train, validation = rows(corpus, held_out=config.validation_fraction), None
    if config.validation_path:
        evaluated = open_corpus(config, config.validation_path, "data.validation_path")
        check_answers(evaluated, answers)
        if evaluated.tokenizer != corpus.tokenizer:
            what = f"{evaluated.path} has ids of another tokenizer than {corpus.path}"
            raise DataError(f"data.validation_path: {what}")
        validation = rows(evaluated)
    elif config.validation_fraction:
        validation = rows(corpus, held_out=config.validation_fraction, on_held_out_side=True)
    return TokenRows(train, train.describe()), validation


def _refuse_too_short(samples: StreamSamples, what: str, way_out: str) -> None:
    if not samples.num_rows:
        raise DataError(
            f"the corpus {what} {samples.num_tokens} tokens, less than one row of train.seq_len + 1 = "
            f"{samples.seq_len + 1}; {way_out}"
        )
