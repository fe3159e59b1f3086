"""Preparation of a run's documents by one rank (corpora, tokenizer, token files), and opening by all ranks.

A run on text or on the standard library first prepares a corpus, as `nxtrain data prepare` does. The documents are then
written as a token file to the run's folder. Documents of a prepared corpus are tokenized on the fly.

Each file name includes a fingerprint of its inputs. A second start therefore reuses the file, and a changed corpus
never uses an old file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from nxtrain.common.errors import DataError
from nxtrain.common.io.atomic import clear_drafts
from nxtrain.common.io.jsonl import read
from nxtrain.common.io.object_store import location_of
from nxtrain.common.process.console import standard_error
from nxtrain.common.process.progress import Progress
from nxtrain.common.vocab import END_BIT
from nxtrain.data.arrow.columns import END_ID_KEY, END_KEY
from nxtrain.data.arrow.pairs import check_answers
from nxtrain.data.arrow.preparation import Watcher, prepare_sources
from nxtrain.data.arrow.preparation_request import OnBad, PreparationRequest
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.sources import find_sources, fingerprint, versions
from nxtrain.data.arrow.streams import CorpusLanes, Documents, content_hash, is_held_out
from nxtrain.data.arrow.token_stream import MARKED, opened_before, write_stream
from nxtrain.data.arrow.work import Counts, Outputs
from nxtrain.data.batch_source import Streams
from nxtrain.data.corpora import stdlib_files, text_files
from nxtrain.data.mixture import Mixture
from nxtrain.data.order import shuffled
from nxtrain.data.prepare import Prepared, digest
from nxtrain.data.samples import AnswerRows
from nxtrain.data.storage import Tokens, cache_folder, refusing
from nxtrain.data.tokenization import KnownTokenizer, TextTokenizer, load_tokenizer, train_bpe

if TYPE_CHECKING:
    from nxtrain.config.schema import DataConfig

_TOKENIZER_BYTES = 32 << 20
"""Bytes of text from which a tokenizer is trained. A larger sample takes longer, and hardly changes frequent merges."""

_GROUP_BYTES = 1 << 20
"""Bytes of text that are tokenized in one call."""

_SKIPPED: dict[str, OnBad] = {"stdlib": "skip", "text": "skip binary"}
"""Policy for unusable files: skip them, since folders of text contain images, and some modules are not UTF-8."""


@dataclass(frozen=True)
class RunCorpora:
    """Corpora of a run, with the shares of a mixture and the held-out fraction.

    Args:
        corpora: The corpora.
        mixture: Share of the rows of each corpus; None for one corpus.
        fraction: `data.validation_fraction`.
        is_text: The run has prepared the corpus from text or from the standard library.
    """

    corpora: Sequence[PreparedCorpus]
    mixture: Mixture | None
    fraction: float
    is_text: bool = False
    name: str = ""
    skipped: tuple[str, ...] = ()

    @property
    def contents(self) -> object:
        """Identity of the corpora and of their shares."""
        if self.is_text:
            return self.corpora[0].checksum
        if self.mixture is None:
            return self.corpora[0].identity
        return tuple(corpus.identity for corpus in self.corpora), self.mixture.shares

    @property
    def split(self) -> tuple[object, ...]:
        """Identity of the split into training and held-out documents."""
        if self.fraction and any(corpus.has_conversations for corpus in self.corpora):
            return self.fraction, "conversations"
        return (self.fraction,)

    @cached_property
    def held_out(self) -> float:
        """Threshold below which a document's hash means held out, as a share of all hashes.

        In a small corpus, no hash may be below the fraction itself. Documents of text are therefore held out in
        ascending order of their hashes until they contain the fraction of the text.
        """
        if not (self.is_text and self.fraction):
            return self.fraction
        (corpus,) = self.corpora
        hashes = np.empty(len(corpus), np.uint64)
        sizes = np.empty(len(corpus), np.int64)
        for document in range(len(corpus)):
            content = corpus.content(document)
            hashes[document] = content_hash(content)
            sizes[document] = len(content)
        order = np.argsort(hashes)
        ascending, total = hashes[order], np.cumsum(sizes[order])
        last = int(np.searchsorted(total, self.fraction * total[-1]))
        following = int(np.searchsorted(ascending, ascending[last], side="right"))  # equal documents stay together
        if following == len(corpus):
            return 1.0
        # Between two neighbours, so that no rounding decides.
        return (float(ascending[last]) + float(ascending[following])) / 2.0**65

    def parts(self, total: float) -> list[float]:
        """Divide a number in proportion to the shares of the corpora; the sum of the parts is at least the number."""
        if self.mixture is None:
            return [total]
        return [-(-total * share // self.mixture.period) for share in self.mixture.shares]


def open_corpora(config: DataConfig, workdir: Path) -> RunCorpora:
    """Open the corpora of a run; text is first prepared as a corpus in a folder."""
    if config.source != "arrow":
        return _text_corpus(config, workdir)
    if not config.mixture:
        return RunCorpora([open_corpus(config, config.path, "data.path")], None, config.validation_fraction)
    corpora = [open_corpus(config, name, "data.mixture") for name in config.mixture]
    return RunCorpora(corpora, Mixture.of(config.mixture, config.weights), config.validation_fraction)


def open_corpus(config: DataConfig, name: str, key: str) -> PreparedCorpus:
    """Open the prepared corpus that a configuration key names."""
    path = location_of(name)
    try:
        corpus = PreparedCorpus(path, cache_folder(config))
    except (DataError, FileNotFoundError) as error:
        if not isinstance(path, Path) or path.exists():
            raise
        relative = ""
        if not path.is_absolute():
            relative = f" (relative to {Path.cwd()})"
        raise DataError(
            f"{key}: {path}{relative} does not exist. data.source=arrow reads a prepared corpus: "
            f"nxtrain data prepare FILES --out {path}"
        ) from error
    if not len(corpus):
        raise DataError(f"{corpus.path} holds no document; prepare it again from files with text")
    return corpus


class _TextWatcher(Watcher):
    """Watcher that displays the progress of a text preparation, and records its first skipped files."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.skipped: list[str] = []

    def begin(self, what: str, num_bytes: int) -> None:
        self._progress.total = num_bytes

    def advance(self, num_bytes: int, counts: Counts) -> None:
        self._progress.show(num_bytes)

    def bad(self, text: str) -> None:
        self.skipped.append(text)


def _text_corpus(config: DataConfig, workdir: Path) -> RunCorpora:
    """Prepare a corpus from text or the standard library, unless it exists; continue an unfinished corpus."""
    name, skipped = config.path, list[str]()
    if config.source == "stdlib":
        name, files = "the standard library", stdlib_files()
    else:
        walked = text_files(config.path)
        files = walked.files
        skipped = [f"{path}: {reason}" for path, reason in walked.skipped.items()]
    sources = find_sources(files, any_text=True)
    out = workdir / f"corpus-{digest(fingerprint(sources), versions(sources), 'sections')}.arrow"
    outputs = Outputs(out)
    corpus = opened_before(out)
    if corpus is None:
        request = PreparationRequest(files, out, on_bad=_SKIPPED[config.source], sections=True)
        with refusing(out), Progress(f"reading {name}") as progress:
            if out.exists():  # a damaged corpus
                outputs.clear()
            watcher = _TextWatcher(progress)
            try:
                prepare_sources(request, sources, watcher)
            except DataError as error:
                outputs.clear_work()  # changed files have another name at the next start
                listed = "".join(f"\n    {line}" for line in watcher.skipped)
                raise DataError(f"{name}: {error}{listed}") from error
        corpus = PreparedCorpus(out)
    if outputs.bad.exists():
        skipped.extend(f"{line['file']}: {line['reason']}: {line['detail']}" for line in read(outputs.bad))
    return RunCorpora([corpus], None, config.validation_fraction, True, name, tuple(skipped))


def prepare_corpora(
    config: DataConfig,
    seq_len: int,
    vocab_size: int,
    workdir: Path,
    of_weights: Callable[[], KnownTokenizer | None] = lambda: None,
    validation_rows: int = 0,
    answers: AnswerRows | None = None,
) -> Prepared:
    """Prepare or check the corpora of a run, and write its tokenizer and token files unless they exist.

    Text is encoded by data.tokenizer, else by the tokenizer of the weights, else by a tokenizer trained on the text.

    Args:
        validation_rows: Maximum rows that an evaluation reads from a prepared corpus; 0 if the run does not evaluate.
        answers: Row format of a preference objective, whose rows are packed in memory.
    """
    clear_drafts(workdir)
    run = open_corpora(config, workdir)
    for corpus in run.corpora:
        check_answers(corpus, answers)
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
    encoded = partial(Documents, tokenizer=tokenizer, vocab_size=vocab_size)
    validation: Path | None = None
    if answers is None:
        evaluated = run
        if config.validation_path:
            evaluated = _evaluated(config, run, identity)
        made_by = _maker(evaluated, identity, tokenizer)
        validation = _write_validation(config, evaluated, made_by, encoded, validation_rows * seq_len + 1, workdir)
    made_by = _maker(run, identity, tokenizer)
    train = str(first.path)
    if run.is_text:
        train = str(_write_training(run, made_by, encoded, workdir))
    return Prepared(
        train=train,
        validation=validation,
        tokenizer=path,
        tokenizer_origin=origin,
        end_of_text=end,
        end_id=end_id,
        trained=trained,
        fingerprint=digest(run.contents, made_by, config.packing, *run.split),
        probe=" ".join(corpus.identity for corpus in run.corpora),
        skipped=run.skipped,
    )


def open_streams(config: DataConfig, prepared: Prepared, *, seq_len: int, vocab_size: int) -> Streams:
    """Open the prepared corpora of a run as training data that is tokenized on the fly."""
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
    """Train a tokenizer on a sample of the training documents, unless an earlier start has trained it."""
    path = workdir / f"tokenizer-{digest(run.contents, run.fraction, vocab_size)}.json"
    if path.exists():
        return path
    num_bytes = min(_TOKENIZER_BYTES, sum(corpus.value_bytes for corpus in run.corpora))
    line = f"training a tokenizer of {vocab_size:,} entries on at most {num_bytes:,} bytes of text"
    standard_error().print(line)

    def texts(progress: Progress) -> Iterator[str]:
        num_read = 0
        for corpus, wanted in zip(run.corpora, run.parts(_TOKENIZER_BYTES), strict=True):
            for content in _sampled(corpus, run.held_out, wanted):
                yield content.decode()
                num_read += len(content)
                progress.show(num_read)
        progress.total = 0
        progress.show(0, "training a tokenizer: merging words")

    with Progress("training a tokenizer: counting words", num_bytes) as progress:
        train_bpe(texts(progress), vocab_size, path)
    return path


def _sampled(corpus: PreparedCorpus, held_out: float, wanted_bytes: float) -> Iterator[bytes]:
    """Texts of training documents, sampled from the whole corpus up to a number of bytes."""
    num_bytes = 0
    for document in shuffled(np.arange(len(corpus)), len(corpus), 0).tolist():
        content = corpus.content(document)
        if not is_held_out(content, held_out):
            yield content
            num_bytes += len(content)
            if num_bytes >= wanted_bytes:
                return


def _check_tokenizer(run: RunCorpora, tokenizer: TextTokenizer | None) -> None:
    if tokenizer is None and len({corpus.tokenizer for corpus in run.corpora}) > 1:
        raise DataError("data.mixture has text and ids, or ids of several tokenizers; name the one in data.tokenizer")
    for corpus in run.corpora:
        if tokenizer and corpus.is_ids and tokenizer.digest != corpus.tokenizer:
            raise DataError(
                f"data.tokenizer: {tokenizer.path} did not make the ids of {corpus.path}; name the one that did, or "
                "prepare the corpus without --tokenizer"
            )


Encoded: TypeAlias = Callable[..., Documents]
"""Function that makes `Documents` from a corpus and `held_out`."""


def _maker(run: RunCorpora, identity: str, tokenizer: TextTokenizer | None) -> str:
    """Identity of the tokenizer of corpora, and of its additions to the text of documents."""
    if tokenizer is None or not tokenizer.marks or all(corpus.is_ids for corpus in run.corpora):
        return identity
    return f"{identity} {tokenizer.marks}"


def _evaluated(config: DataConfig, run: RunCorpora, identity: str) -> RunCorpora:
    """Open the corpus of `data.validation_path`."""
    evaluated = open_corpus(config, config.validation_path, "data.validation_path")
    if evaluated.tokenizer not in {"", identity}:
        what = f"{evaluated.path} has ids of another tokenizer than {run.corpora[0].path}"
        raise DataError(f"data.validation_path: {what}")
    return RunCorpora([evaluated], None, 0.0)


def _write_validation(
    config: DataConfig, run: RunCorpora, made_by: str, encoded: Encoded, num_tokens: int, workdir: Path
) -> Path | None:
    """Write the held-out tokens that an evaluation reads, unless their file exists; None without an evaluation."""
    most_tokens = math.inf if run.is_text else num_tokens
    if not (config.validation_path or run.fraction) or most_tokens <= 1:
        return None
    file = workdir / f"validation-{digest(run.contents, made_by, *run.split, most_tokens)}.arrow"
    if opened_before(file) is not None:
        return file

    def held_out() -> Iterator[list[Tokens]]:
        for corpus, wanted in zip(run.corpora, run.parts(most_tokens), strict=True):
            documents = encoded(corpus, held_out=run.held_out)
            yield from _marked(documents, on_held_out_side=run.held_out > 0, most_tokens=wanted)

    with Progress("tokenizing held-out documents"):
        write_stream(file, held_out())
    return file


def _write_training(run: RunCorpora, made_by: str, encoded: Encoded, workdir: Path) -> Path:
    file = workdir / f"train-{digest(run.contents, made_by, run.fraction)}.arrow"
    if opened_before(file) is not None:
        return file
    (corpus,) = run.corpora
    standard_error().print(f"tokenizing {corpus.value_bytes:,} bytes of {run.name}")
    documents = encoded(corpus, held_out=run.held_out)
    with Progress("tokenizing", corpus.value_bytes) as progress:
        write_stream(file, _marked(documents, on_held_out_side=False, progress=progress))
    return file


def _marked(
    documents: Documents, *, on_held_out_side: bool, most_tokens: float = math.inf, progress: Progress | None = None
) -> Iterator[list[Tokens]]:
    """Token ids of the training or the held-out documents, in groups, in corpus order.

    The last id of a document has an end mark. A section that continues in the next section on this side of the split
    has none. The sections of a file are thus one document, unless a section between them is on the other side.

    Args:
        on_held_out_side: Select the held-out documents instead of the training documents.
        most_tokens: Maximum number of tokens; the last document is cut.
        progress: Called with the number of bytes read.
    """
    corpus = documents.corpus
    contents: list[bytes] = []
    prompts: list[int] = []
    continues: list[bool] = []  # the section before is on this side, too
    continued: list[bool] = []  # the section after is on this side, too
    is_next = False
    num_bytes = num_read = 0
    num_tokens = 0
    following = corpus.content(0)
    for document in range(len(corpus)):
        content, is_last = following, document == len(corpus) - 1
        following = b"" if is_last else corpus.content(document + 1)
        num_read += len(content)
        if documents.is_held_out(document, content) == on_held_out_side:
            contents.append(content)
            prompts.append(corpus.prompt(document, content))
            num_bytes += len(content)
            continues.append(is_next)
            is_next = corpus.continues(document) and is_held_out(following, documents.held_out) == on_held_out_side
            continued.append(is_next)
        if num_bytes < _GROUP_BYTES and not is_last:
            continue
        group: list[Tokens] = []
        for ids, has_next in zip(documents.ids(contents, prompts, continues), continued, strict=True):
            marked: Tokens = ids.astype(MARKED)
            marked[-1] |= END_BIT
            if has_next:
                marked = marked[:-1]
            if num_tokens + marked.size >= most_tokens:
                yield [*group, marked[: int(most_tokens) - num_tokens]]
                return
            group.append(marked)
            num_tokens += marked.size
        if group:
            yield group
        for values in (contents, prompts, continues, continued):
            values.clear()
        num_bytes = 0
        if progress:
            progress.show(num_read)
