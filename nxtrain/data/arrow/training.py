"""Preparation of a run's documents by one rank: corpora, tokenizer and token files, and the streams of every rank.

A run on text or on the standard library first makes a corpus of it, as `nxtrain data prepare` does. Its documents then
become a stream of tokens in the run's folder. Documents of a prepared corpus are tokenized while they are consumed.

The name of every file has the fingerprint of its inputs. A second start therefore reuses the file, and a changed corpus
never uses an old one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nxtrain.common.errors import DataError
from nxtrain.common.io.atomic import clear_drafts
from nxtrain.common.process.console import standard_error
from nxtrain.common.process.progress import Progress
from nxtrain.common.vocab import END_BIT
from nxtrain.data.arrow.columns import END_ID_KEY, END_KEY
from nxtrain.data.arrow.lanes import CorpusLanes, open_documents
from nxtrain.data.arrow.run_corpora import RunCorpora, open_corpora, open_corpus
from nxtrain.data.arrow.streams import Documents
from nxtrain.data.arrow.token_stream import MARKED, opened_before, write_stream
from nxtrain.data.batch_source import Streams
from nxtrain.data.order import shuffled
from nxtrain.data.prepare import Prepared, digest
from nxtrain.data.storage import Tokens, cache_folder
from nxtrain.data.tokenization import KnownTokenizer, TextTokenizer, load_tokenizer, train_bpe

if TYPE_CHECKING:
    from nxtrain.config.schema import DataConfig

_TOKENIZER_BYTES = 32 << 20
"""Text from which a tokenizer is trained; a larger sample hardly changes the frequent merges, but takes longer."""

_GROUP_BYTES = 1 << 20
"""Text that is tokenized at once."""


def prepare_corpora(  # 6 arguments: each is of another part of the run, and there is one call
    config: DataConfig,
    seq_len: int,
    vocab_size: int,
    workdir: Path,
    of_weights: Callable[[], KnownTokenizer | None] = lambda: None,
    validation_rows: int = 0,
) -> Prepared:
    """Make or check the corpora of a run, and write its tokenizer and token files, unless they are written already.

    Text is encoded by data.tokenizer, else by the weights' tokenizer, else by one that is trained on the text.

    Args:
        validation_rows: Most rows that an evaluation reads of a prepared corpus; 0: the run does not evaluate.
    """
    clear_drafts(workdir)
    run = open_corpora(config, workdir)
    given = KnownTokenizer(Path(config.tokenizer).expanduser()) if config.tokenizer else of_weights()
    has_ids = any(corpus.is_ids for corpus in run.corpora)
    trained = given is None and not has_ids
    if trained:
        given = KnownTokenizer(_train_tokenizer(run, vocab_size, workdir))
    tokenizer: TextTokenizer | None = None
    origin = ""
    if given:
        tokenizer = load_tokenizer(given.path, vocab_size, given.end)
        origin = given.origin
    _check_tokenizer(run, tokenizer)
    first = run.corpora[0]
    path: Path | None = None
    if tokenizer:
        path, identity = tokenizer.path, tokenizer.digest
        end, end_id = tokenizer.end, tokenizer.end_id
    else:
        identity = first.tokenizer
        end = first.metadata.get(END_KEY, b"").decode(errors="replace")
        end_id = int(first.metadata[END_ID_KEY])
    encoding = _Encoding(tokenizer, identity, vocab_size, workdir)
    validation = _validation(config, run, encoding, validation_rows * seq_len + 1)
    train = str(first.path)
    if run.is_text:
        train = str(_training(run, encoding))
    return Prepared(
        train=train,
        validation=validation,
        tokenizer=path,
        tokenizer_origin=origin,
        end_of_text=end,
        end_id=end_id,
        trained=trained,
        fingerprint=digest(run.contents, identity, config.packing, config.validation_fraction),
        probe=" ".join(corpus.identity for corpus in run.corpora),
        skipped=run.skipped,
    )


def open_streams(config: DataConfig, prepared: Prepared, *, seq_len: int, vocab_size: int) -> Streams:
    """Open the streams of prepared corpora."""
    run = open_corpora(config, Path())
    tokenizer = prepared.tokenizer
    if all(corpus.is_ids for corpus in run.corpora):
        tokenizer = None
    source = CorpusLanes(
        paths=tuple(corpus.path for corpus in run.corpora),
        identities=tuple(prepared.probe.split()),
        mixture=run.mixture,
        tokenizer=tokenizer,
        end_of_text=prepared.end_of_text,
        vocab_size=vocab_size,
        held_out=config.validation_fraction,
        packing=config.packing,
        seq_len=seq_len,
        cache=cache_folder(config),
    )
    assert prepared.end_id is not None
    sizes = tuple(len(documents.corpus) for documents in source.documents())
    return Streams(source, sizes, seq_len, prepared.end_id, run.mixture)


def _train_tokenizer(run: RunCorpora, vocab_size: int, workdir: Path) -> Path:
    """Train a tokenizer on a sample of the documents to train on, unless an earlier start has trained it."""
    path = workdir / f"tokenizer-{digest(run.contents, run.fraction, vocab_size)}.json"
    if path.exists():
        return path
    num_bytes = min(_TOKENIZER_BYTES, sum(corpus.value_bytes for corpus in run.corpora))
    line = f"training a tokenizer of {vocab_size:,} entries on at most {num_bytes:,} bytes of text"
    standard_error().print(line, markup=False)

    def texts(progress: Progress) -> Iterator[str]:
        num_read = 0
        for corpus, wanted in zip(run.corpora, run.parts(_TOKENIZER_BYTES), strict=True):
            for content in _sampled(open_documents(corpus, None, run.held_out, vocab_size), wanted):
                yield content.decode()
                num_read += len(content)
                progress.show(num_read)
        progress.total = 0
        progress.show(0, "training a tokenizer: merging words")

    with Progress("training a tokenizer: counting words", num_bytes) as progress:
        train_bpe(texts(progress), vocab_size, path)
    return path


def _sampled(documents: Documents, wanted_bytes: float) -> Iterator[bytes]:
    """Text of documents to train on, drawn from a whole corpus, up to a number of bytes."""
    corpus, num_bytes = documents.corpus, 0
    for document in shuffled(np.arange(len(corpus)), len(corpus), 0).tolist():
        content = corpus.content(document)
        if not documents.is_held_out(content):
            yield content
            num_bytes += len(content)
            if num_bytes >= wanted_bytes:
                return


def _check_tokenizer(run: RunCorpora, tokenizer: TextTokenizer | None) -> None:
    """Refuse corpora whose ids were made by another tokenizer."""
    if tokenizer is None and len({corpus.tokenizer for corpus in run.corpora}) > 1:
        raise DataError("data.mixture has text and ids, or ids of several tokenizers; name the one in data.tokenizer")
    for corpus in run.corpora:
        if tokenizer and corpus.is_ids and tokenizer.digest != corpus.tokenizer:
            raise DataError(
                f"data.tokenizer: {tokenizer.path} did not make the ids of {corpus.path}; name the one that did, or "
                "prepare the corpus without --tokenizer"
            )


@dataclass(frozen=True)
class _Encoding:
    """Encoding of documents for token files.

    Args:
        tokenizer: Tokenizer of text; None for ids.
    """

    tokenizer: TextTokenizer | None
    identity: str
    vocab_size: int
    workdir: Path


def _validation(config: DataConfig, run: RunCorpora, encoding: _Encoding, num_tokens: int) -> Path | None:
    """Write the tokens that an evaluation reads, unless their file exists; None without an evaluation."""
    if config.validation_path:
        evaluated = open_corpus(config, config.validation_path, "data.validation_path")
        if evaluated.tokenizer not in {"", encoding.identity}:
            what = f"{evaluated.path} has ids of another tokenizer than {run.corpora[0].path}"
            raise DataError(f"data.validation_path: {what}")
        run = RunCorpora([evaluated], None, 0.0)
    most_tokens = math.inf if run.is_text else num_tokens
    if not (config.validation_path or run.fraction) or most_tokens <= 1:
        return None
    name = digest(run.contents, encoding.identity, run.fraction, most_tokens)
    file = encoding.workdir / f"validation-{name}.arrow"
    if opened_before(file) is not None:
        return file

    def held_out() -> Iterator[list[Tokens]]:
        for corpus, wanted in zip(run.corpora, run.parts(most_tokens), strict=True):
            documents = open_documents(corpus, encoding.tokenizer, run.held_out, encoding.vocab_size)
            yield from _marked(documents, is_held_out=run.held_out > 0, most_tokens=wanted)

    with Progress("tokenizing held-out documents"):
        write_stream(file, held_out())
    return file


def _training(run: RunCorpora, encoding: _Encoding) -> Path:
    """Write the tokens of text that are trained on, unless they are there."""
    file = encoding.workdir / f"train-{digest(run.contents, encoding.identity, run.fraction)}.arrow"
    if opened_before(file) is not None:
        return file
    (corpus,) = run.corpora
    standard_error().print(f"tokenizing {corpus.value_bytes:,} bytes of {run.name}", markup=False)
    documents = open_documents(corpus, encoding.tokenizer, run.held_out, encoding.vocab_size)
    with Progress("tokenizing", corpus.value_bytes) as progress:
        write_stream(file, _marked(documents, is_held_out=False, progress=progress))
    return file


def _marked(
    documents: Documents, *, is_held_out: bool, most_tokens: float = math.inf, progress: Progress | None = None
) -> Iterator[list[Tokens]]:
    """Groups of documents on one side of the split, in the order of the corpus, as ids with marks of their ends.

    Args:
        documents: The documents.
        is_held_out: Take those that are held out; otherwise the others.
        most_tokens: Tokens after which the last document is cut.
        progress: Gets the bytes that are read.
    """
    corpus = documents.corpus
    contents: list[bytes] = []
    prompts: list[int] = []
    num_bytes = num_read = 0
    num_tokens = 0
    for document in range(len(corpus)):
        content = corpus.raw(document)
        num_read += len(content)
        if documents.is_held_out(content) == is_held_out:
            contents.append(content)
            prompts.append(corpus.prompt(document, content))
            num_bytes += len(content)
        if num_bytes < _GROUP_BYTES and document < len(corpus) - 1:
            continue
        group: list[Tokens] = []
        for ids in documents.ids(contents, prompts):
            marked: Tokens = ids.astype(MARKED)
            marked[-1] |= END_BIT
            if num_tokens + ids.size >= most_tokens:
                yield [*group, marked[: int(most_tokens) - num_tokens]]
                return
            group.append(marked)
            num_tokens += ids.size
        if group:
            yield group
        contents, prompts, num_bytes = [], [], 0
        if progress:
            progress.show(num_read)
