"""Training on a prepared corpus: tokenizer and held-out tokens, made by one rank, and the streams of every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nxtrain.common.errors import DataError
from nxtrain.common.io.atomic import clear_drafts
from nxtrain.common.io.object_store import place_of
from nxtrain.common.process.progress import Progress
from nxtrain.common.vocab import END_BIT
from nxtrain.data.arrow.columns import END_ID_KEY, END_KEY
from nxtrain.data.arrow.lanes import CorpusLanes, open_documents
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.streams import Documents
from nxtrain.data.files import MARKED, Tokens, read_array, writing_tokens
from nxtrain.data.mixture import Mixture
from nxtrain.data.order import shuffled
from nxtrain.data.packing import concat
from nxtrain.data.prepare import Prepared, digest, is_whole, train_tokenizer
from nxtrain.data.samples import probe
from nxtrain.data.storage import cache_folder
from nxtrain.data.stream_loader import Streams
from nxtrain.data.tokenization import KnownTokenizer, TextTokenizer, load_tokenizer

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
    """Check prepared corpora, and write their held-out tokens, unless they are written already.

    Args:
        config: The `[data]` section.
        held_out: Rows that an evaluation reads.
        vocab_size: Entries of the model's vocabulary.
        workdir: Folder for prepared files.
        of_weights: Returns the tokenizer of the initial weights.

    Raises:
        DataError: A corpus is damaged or empty, or its ids are those of another tokenizer or vocabulary.
        StorageError: The storage fails.
    """
    clear_drafts(workdir)
    mixture, corpora = _corpora(config)
    given = KnownTokenizer(Path(config.tokenizer).expanduser()) if config.tokenizer else of_weights()
    made = {corpus.tokenizer for corpus in corpora if corpus.is_ids}
    trained = given is None and not made
    if trained:
        given = KnownTokenizer(_train_tokenizer(corpora, mixture, config, vocab_size, workdir))
    tokenizer: TextTokenizer | None = None
    origin = ""
    if given:
        tokenizer = load_tokenizer(given.path, vocab_size, given.end)
        origin = given.origin
    if tokenizer is None and len({corpus.tokenizer for corpus in corpora}) > 1:
        raise DataError("data.mixture has text and ids, or ids of several tokenizers; name the one in data.tokenizer")
    for corpus in corpora:
        if tokenizer and corpus.is_ids and tokenizer.digest != corpus.tokenizer:
            raise DataError(
                f"data.tokenizer: {tokenizer.path} did not make the ids of {corpus.path}; name the one that did, or "
                "prepare the corpus without --tokenizer"
            )
    first = corpora[0]
    path: Path | None = None
    if tokenizer:
        path, identity = tokenizer.path, tokenizer.digest
        end, end_id = tokenizer.end, tokenizer.end_id
    else:
        identity = first.tokenizer
        end = first.metadata.get(END_KEY, b"").decode(errors="replace")
        end_id = int(first.metadata[END_ID_KEY])
    validation = _validation(config, held_out, (mixture, corpora), tokenizer, identity, vocab_size, workdir)
    validation_probe = ""
    if validation:
        validation_probe = probe(concat(read_array(validation), held_out.seq_len))
    return Prepared(
        train=str(first.path),
        validation=validation,
        tokenizer=path,
        tokenizer_origin=origin,
        end_of_text=end,
        end_id=end_id,
        trained=trained,
        fingerprint=digest(_contents(mixture, corpora), identity, config.packing, config.validation_fraction),
        has_checksums=True,
        probe=" ".join(corpus.identity for corpus in corpora),
        validation_probe=validation_probe,
    )


def open_streams(config: DataConfig, prepared: Prepared, *, seq_len: int, vocab_size: int) -> Streams:
    """Open the streams of prepared corpora.

    Raises:
        DataError: A corpus differs from that which was checked.
    """
    mixture, corpora = _corpora(config)
    tokenizer = prepared.tokenizer
    if all(corpus.is_ids for corpus in corpora):
        tokenizer = None
    source = CorpusLanes(
        paths=tuple(corpus.path for corpus in corpora),
        identities=tuple(prepared.probe.split()),
        mixture=mixture,
        tokenizer=tokenizer,
        end_of_text=prepared.end_of_text,
        vocab_size=vocab_size,
        held_out=config.validation_fraction,
        packing=config.packing,
        seq_len=seq_len,
        cache=cache_folder(config),
    )
    return Streams(source, tuple(len(documents.corpus) for documents in source.documents()), mixture)


def _corpora(config: DataConfig) -> tuple[Mixture | None, list[PreparedCorpus]]:
    if not config.mixture:
        return None, [_open(config, config.path, "data.path")]
    corpora = [_open(config, name, "data.mixture") for name in config.mixture]
    return Mixture.of(config.mixture, config.weights), corpora


def _contents(mixture: Mixture | None, corpora: Sequence[PreparedCorpus]) -> object:
    """Identity of the corpora and of their shares."""
    if mixture is None:
        return corpora[0].identity
    return tuple(corpus.identity for corpus in corpora), mixture.shares


def _open(config: DataConfig, name: str, key: str) -> PreparedCorpus:
    path = place_of(name)
    if isinstance(path, Path) and not path.exists():
        relative = "" if path.is_absolute() else f" (relative to {Path.cwd()})"
        raise DataError(
            f"{key}: {path}{relative} does not exist. data.source=arrow reads a prepared corpus: "
            f"nxtrain data prepare FILES --out {path}"
        )
    corpus = PreparedCorpus(path, cache_folder(config))
    if not len(corpus):
        raise DataError(f"{corpus.path} holds no document; prepare it again from files with text")
    return corpus


def _parts(mixture: Mixture | None, total: int) -> list[int]:
    """Parts of a number by the shares of the corpora; their sum is not less."""
    if mixture is None:
        return [total]
    return [-(-total * share // mixture.period) for share in mixture.shares]


def _train_tokenizer(
    corpora: Sequence[PreparedCorpus], mixture: Mixture | None, config: DataConfig, vocab_size: int, workdir: Path
) -> Path:
    """Train a tokenizer on some of the documents to train on, drawn from all."""
    path = workdir / f"tokenizer-{digest(_contents(mixture, corpora), config.validation_fraction, vocab_size)}.json"

    def texts() -> Iterator[str]:
        for corpus, wanted in zip(corpora, _parts(mixture, _TOKENIZER_BYTES), strict=True):
            yield from _sampled(open_documents(corpus, None, config.validation_fraction, vocab_size), wanted)

    if not path.exists():
        train_tokenizer(texts(), 0, vocab_size, path)
    return path


def _sampled(documents: Documents, wanted_bytes: int) -> Iterator[str]:
    """Text of documents to train on, drawn from a whole corpus, up to a number of bytes."""
    corpus, num_bytes = documents.corpus, 0
    for document in shuffled(np.arange(len(corpus)), len(corpus), 0).tolist():
        content = corpus.content(document)
        if not documents.is_held_out(content):
            yield content.decode()
            num_bytes += len(content)
            if num_bytes >= wanted_bytes:
                return


def _validation(  # 7 arguments: each is of another part of the preparation, and there is one call
    config: DataConfig,
    held_out: HeldOut,
    sources: tuple[Mixture | None, Sequence[PreparedCorpus]],
    tokenizer: TextTokenizer | None,
    identity: str,
    vocab_size: int,
    workdir: Path,
) -> Path | None:
    """Write the tokens that an evaluation reads, unless they are there; None without an evaluation."""
    mixture, corpora = sources
    if config.validation_path:
        evaluated = _open(config, config.validation_path, "data.validation_path")
        if evaluated.tokenizer not in {"", identity}:
            what = f"{evaluated.path} has ids of another tokenizer than {corpora[0].path}"
            raise DataError(f"data.validation_path: {what}")
        mixture, corpora = None, [evaluated]
    if not held_out.num_rows or not (config.validation_path or config.validation_fraction):
        return None
    name = digest(_contents(mixture, corpora), identity, config.validation_fraction, held_out.num_tokens)
    validation = workdir / f"validation-marked-{name}.npy"
    if not is_whole(validation):
        with Progress("tokenizing held-out documents"), writing_tokens(validation, MARKED) as append:
            for corpus, wanted in zip(corpora, _parts(mixture, held_out.num_tokens), strict=True):
                documents = open_documents(corpus, tokenizer, config.validation_fraction, vocab_size)
                _append_held_out(documents, append, wanted)
    return validation


def _append_held_out(documents: Documents, append: Callable[[Tokens], None], num_tokens: int) -> None:
    """Write the tokens of held-out documents, in the order of the corpus, up to a number; without a share, of all."""
    corpus, written = documents.corpus, 0
    for document in range(len(corpus)):
        if written >= num_tokens:
            return
        content = corpus.raw(document)
        if not documents.held_out or documents.is_held_out(content):
            (ids,) = documents.ids([content], [corpus.prompt(document, content)])
            marked = ids.astype(MARKED)
            marked[-1] |= END_BIT
            append(marked[: num_tokens - written])
            written += ids.size
