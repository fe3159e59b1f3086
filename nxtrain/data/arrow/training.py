"""Training on a prepared corpus: tokenizer and held-out tokens, made by one rank, and the streams of every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from nxtrain.data.arrow.columns import END_ID_KEY, END_KEY
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.streams import Documents, open_lane
from nxtrain.data.files import read_array, writing_tokens
from nxtrain.data.order import shuffled
from nxtrain.data.packing import concat
from nxtrain.data.prepare import Prepared, digest, is_whole
from nxtrain.data.samples import probe
from nxtrain.data.stream_loader import Lane, LaneOrder, Place, Streams
from nxtrain.data.tokenization import KnownTokenizer, TextTokenizer, load_tokenizer, train_bpe
from nxtrain.errors import DataError
from nxtrain.io.atomic import clear_drafts

if TYPE_CHECKING:
    from nxtrain.config.schema import DataConfig

_TOKENIZER_BYTES = 32 << 20
"""Text from which a tokenizer is trained."""


@dataclass(frozen=True)
class HeldOut:
    """Rows that an evaluation reads.

    Args:
        seq_len: Targets in a row.
        num_rows: Most rows; 0: the run does not evaluate.
    """

    seq_len: int
    num_rows: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, each of which begins with the last token of the row before."""
        return self.num_rows * self.seq_len + 1


def prepare_streams(
    config: DataConfig,
    held_out: HeldOut,
    vocab_size: int,
    workdir: Path,
    of_weights: Callable[[], KnownTokenizer | None],
) -> Prepared:
    """Check a prepared corpus, and write its held-out tokens, unless they are written already.

    Args:
        config: The `[data]` section.
        held_out: Rows that an evaluation reads.
        vocab_size: Entries of the model's vocabulary.
        workdir: Folder for prepared files.
        of_weights: Returns the tokenizer of the initial weights.

    Raises:
        DataError: The corpus is damaged or empty, or its ids are those of another tokenizer or vocabulary.
        StorageError: The storage fails.
    """
    clear_drafts(workdir)
    corpus = _open(config.path, "data.path")
    known = KnownTokenizer(Path(config.tokenizer).expanduser()) if config.tokenizer else of_weights()
    trained = known is None and not corpus.is_ids
    if trained:
        known = KnownTokenizer(_train_tokenizer(corpus, config, vocab_size, workdir))
    tokenizer = load_tokenizer(known.path, vocab_size, known.end) if known else None
    if tokenizer and corpus.is_ids and tokenizer.digest != corpus.tokenizer:
        raise DataError(
            f"data.tokenizer: {tokenizer.path} did not make the ids of {corpus.path}; name the one that did, or "
            "prepare the corpus without --tokenizer"
        )
    identity = tokenizer.digest if tokenizer else corpus.tokenizer
    settings = (config.packing, config.validation_fraction)
    documents = _documents(corpus, tokenizer, config, vocab_size)
    validation = None
    if config.validation_path:
        evaluated = _open(config.validation_path, "data.validation_path")
        if evaluated.tokenizer not in {"", identity}:
            raise DataError(f"data.validation_path: {evaluated.path} has ids of another tokenizer than {corpus.path}")
        documents = replace(documents, corpus=evaluated, tokenizer=None if evaluated.is_ids else tokenizer)
    if held_out.num_rows and (config.validation_path or config.validation_fraction):
        name = digest(documents.corpus.identity, identity, config.validation_fraction, held_out.num_tokens)
        validation = workdir / f"validation-{name}.npy"
        if not is_whole(validation):
            _write_held_out(documents, validation, held_out.num_tokens)
    return Prepared(
        train=corpus.path,
        validation=validation,
        tokenizer=tokenizer.path if tokenizer else None,
        tokenizer_origin=known.origin if known else "",
        end_of_text=tokenizer.end if tokenizer else corpus.metadata.get(END_KEY, b"").decode(errors="replace"),
        end_id=tokenizer.end_id if tokenizer else int(corpus.metadata[END_ID_KEY]),
        trained=trained,
        fingerprint=digest(corpus.identity, identity, *settings),
        has_checksums=True,
        probe=corpus.identity,
        validation_probe=probe(concat(read_array(validation), held_out.seq_len)) if validation else "",
    )


@dataclass(frozen=True)
class CorpusLanes:
    """Source of the lanes of a prepared corpus.

    Args:
        path: The corpus.
        identity: Identity of the corpus that was checked.
        tokenizer: The `tokenizer.json` of text; None for ids.
        end_of_text: Token that ends a document.
        vocab_size: Entries of the model's vocabulary.
        held_out: Share of the documents that are held out.
        packing: Way to pack.
        seq_len: Targets in a row.
    """

    path: Path
    identity: str
    tokenizer: Path | None
    end_of_text: str
    vocab_size: int
    held_out: float
    packing: Literal["concat", "best_fit"]
    seq_len: int

    def documents(self, mark: Callable[[str], None] | None = None) -> Documents:
        """Open the documents.

        Raises:
            DataError: The corpus differs from that which was checked.
        """
        corpus = PreparedCorpus(self.path)
        if corpus.identity != self.identity:
            raise DataError(
                f"{corpus.path} is another corpus on this machine than on that which checked it; copy it anew"
            )
        tokenizer = load_tokenizer(self.tokenizer, self.vocab_size, self.end_of_text) if self.tokenizer else None
        return Documents(corpus, tokenizer, self.vocab_size, self.held_out, mark)

    def opened(self, mark: Callable[[str], None] | None = None) -> Callable[[LaneOrder, int, Place], Lane]:
        """Open the documents; returns the function that opens a lane."""
        return partial(open_lane, self.documents(mark), self.packing, self.seq_len)


def open_streams(config: DataConfig, prepared: Prepared, *, seq_len: int, vocab_size: int) -> Streams:
    """Open the streams of a prepared corpus.

    Raises:
        DataError: The corpus differs from that which was checked.
    """
    corpus = _open(config.path, "data.path")
    source = CorpusLanes(
        path=corpus.path,
        identity=prepared.probe,
        tokenizer=None if corpus.is_ids else prepared.tokenizer,
        end_of_text=prepared.end_of_text,
        vocab_size=vocab_size,
        held_out=config.validation_fraction,
        packing=config.packing,
        seq_len=seq_len,
    )
    return Streams(source, len(source.documents().corpus))


def _open(name: str, key: str) -> PreparedCorpus:
    path = Path(name).expanduser()
    if not path.exists():
        relative = "" if path.is_absolute() else f" (relative to {Path.cwd()})"
        raise DataError(
            f"{key}: {path}{relative} does not exist. data.source=arrow reads a prepared corpus: "
            f"nxtrain data prepare FILES --out {path}"
        )
    corpus = PreparedCorpus(path)
    if not len(corpus):
        raise DataError(f"{corpus.path} holds no document; prepare it again from files with text")
    return corpus


def _documents(
    corpus: PreparedCorpus, tokenizer: TextTokenizer | None, config: DataConfig, vocab_size: int
) -> Documents:
    of_text = None if corpus.is_ids else tokenizer
    return Documents(corpus, of_text, vocab_size, config.validation_fraction)


def _train_tokenizer(corpus: PreparedCorpus, config: DataConfig, vocab_size: int, workdir: Path) -> Path:
    """Train a tokenizer on some of the documents to train on, drawn from all."""
    path = workdir / f"tokenizer-{digest(corpus.identity, config.validation_fraction, vocab_size)}.json"
    chooser = Documents(corpus, None, vocab_size, config.validation_fraction)

    def texts() -> Iterator[str]:
        num_bytes = 0
        for document in shuffled(np.arange(len(corpus)), len(corpus), 0).tolist():
            content = corpus.content(document)
            if not chooser.is_held_out(content):
                yield content.decode()
                num_bytes += len(content)
                if num_bytes >= _TOKENIZER_BYTES:
                    return

    if not path.exists():
        train_bpe(texts(), vocab_size, path)
    return path


def _write_held_out(documents: Documents, path: Path, num_tokens: int) -> None:
    """Write the tokens of held-out documents, in the order of the corpus, up to a number; without a share, of all."""
    corpus, written = documents.corpus, 0
    dtype = documents.tokenizer.dtype if documents.tokenizer else corpus.dtype
    with writing_tokens(path, dtype) as append:
        for document in range(len(corpus)):
            if written >= num_tokens:
                return
            content = corpus.raw(document)
            if not documents.held_out or documents.is_held_out(content):
                (ids,) = documents.ids([content])
                append(ids[: num_tokens - written])
                written += ids.size
