"""Preparation of the data by one rank before training: split a corpus, train its tokenizer, write its token files.

The name of every file has the fingerprint of its inputs. A second start therefore reuses the file, and a changed corpus
never uses an old one.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from nxtrain.common.errors import DataError
from nxtrain.common.io.atomic import clear_drafts
from nxtrain.common.io.object_store import S3Path, place_of
from nxtrain.common.process.console import standard_error
from nxtrain.common.process.progress import Progress
from nxtrain.common.vocab import END_BIT
from nxtrain.data.corpora import Corpus, stdlib_corpus, text_corpus
from nxtrain.data.files import MARKED, read_array, read_checksums, writing_tokens
from nxtrain.data.mixture import Mixture
from nxtrain.data.packing import concat
from nxtrain.data.samples import check_remote, check_table, probe
from nxtrain.data.storage import RemoteFile, cache_folder
from nxtrain.data.tokenization import KnownTokenizer, TextTokenizer, load_tokenizer, train_bpe

if TYPE_CHECKING:
    from nxtrain.config.schema import DataConfig

SECTION_CHARS = 1 << 16
"""Longest section of text that is split or encoded as one; bounds the memory for a huge document."""

_BATCH_CHARS = 1 << 20  # text that is encoded at once; an encoding takes some 100 bytes a token

_TOKENIZER_CHARS = 32 << 20  # a larger sample hardly changes the frequent merges, but takes longer


class Prepared(BaseModel):
    """Prepared files of a run's data.

    Attributes:
        train: Path or address of the corpus or the token file.
        validation: Token file; None if no text is held out.
        tokenizer: The `tokenizer.json` that made the ids; None for ids of unknown origin.
        tokenizer_origin: Origin of a tokenizer that came with the weights; else empty.
        end_of_text: The tokenizer's token that ends a document; empty if unknown.
        end_id: Id of that token; None if unknown.
        trained: The tokenizer was trained on this data.
        fingerprint: Identity of the files' content.
        has_checksums: The run wrote the token files, with checksums next to them.
        probe, validation_probe: Digest of a sample of the checked ids; see `nxtrain.data.samples.probe`.
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
    has_checksums: bool
    probe: str
    validation_probe: str = ""
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class CorpusSurvey:
    """Sections of a corpus, in order: documents, or parts of documents longer than `SECTION_CHARS`.

    Attributes:
        hashes: (n,) hash of each section's text.
        chars: (n,) length of each section in characters.
        documents: (n,) number of each section's document.
    """

    hashes: NDArray[np.uint64]
    chars: NDArray[np.int64]
    documents: NDArray[np.int64]

    @staticmethod
    def of(corpus: Iterable[str]) -> CorpusSurvey:
        """Read a corpus once, and survey its sections."""
        hashes = array("Q")
        chars = array("q")
        documents = array("q")
        for document, text in sections(corpus):
            hashes.append(_hash(text))
            chars.append(len(text))
            documents.append(document)
        return CorpusSurvey(np.array(hashes, np.uint64), np.array(chars, np.int64), np.array(documents, np.int64))

    def again(self, corpus: Corpus) -> Iterator[str]:
        """Read the corpus again: yields the text of each section, which must equal the surveyed text.

        Raises:
            DataError: The corpus has changed; names the file.
        """
        number = 0
        for document, text in sections(corpus):
            is_expected = number < self.hashes.size and document == self.documents[number]
            if not is_expected or _hash(text) != int(self.hashes[number]):
                raise _changed(corpus, f"{corpus.reading} (document {document} of the corpus, from 0)")
            yield text
            number += 1
        if number < self.hashes.size:
            raise _changed(corpus, f"its end (document {self.documents[number]} of the corpus, from 0, is gone)")

    def split(self, validation_fraction: float) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Two (n,) masks: the held-out sections, and the training sections from which the tokenizer learns.

        Sections are held out in ascending order of their hashes until they hold the fraction of the text. The choice
        depends neither on the order of the corpus nor on a seed. It hardly changes when the corpus grows.
        """
        order = np.argsort(self.hashes, kind="stable")
        total = np.cumsum(self.chars[order])
        wanted = validation_fraction * total[-1]
        num_held, chars_held = 0, 0
        if wanted:
            num_held = int(np.searchsorted(total, wanted)) + 1
            chars_held = total[num_held - 1]
        num_sampled = int(np.searchsorted(total, chars_held + _TOKENIZER_CHARS)) + 1
        held, sampled = np.zeros(order.size, np.bool_), np.zeros(order.size, np.bool_)
        held[order[:num_held]] = True
        sampled[order[num_held:num_sampled]] = True
        return held, sampled

    def digest(self) -> str:
        """Identity of the text and of the bounds of its documents and sections."""
        return hashlib.blake2b(self.hashes.tobytes() + self.documents.tobytes()).hexdigest()

    def ends(self, held: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """(n,) mask of sections that end a document: the next one is of another document, or across the split."""
        last = np.ones(held.size, np.bool_)
        last[:-1] = (np.diff(self.documents) != 0) | (held[1:] != held[:-1])
        return last


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _changed(corpus: Corpus, where: str) -> DataError:
    return DataError(
        f"{corpus.name} changed while it was read, which was found at {where}; start again when nobody writes to it"
    )


def sections(corpus: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Split documents into sections of at most `SECTION_CHARS`, if possible at the end of a line.

    Yields:
        Number of the document, and the text of a section.
    """
    for number, document in enumerate(corpus):
        start = 0
        while len(document) - start > SECTION_CHARS:
            end = document.rfind("\n", start, start + SECTION_CHARS) + 1 or start + SECTION_CHARS
            yield number, document[start:end]
            start = end
        yield number, document[start:]


def prepare(
    config: DataConfig,
    *,
    seq_len: int,
    vocab_size: int,
    workdir: Path,
    of_weights: Callable[[], KnownTokenizer | None] = lambda: None,
) -> Prepared:
    """Check the data of a run and write the token files, unless they exist already.

    Text is encoded by data.tokenizer, else by the weights' tokenizer, else by one that is trained on the text.

    Raises:
        DataError: Data that is missing, malformed, empty or outside of the vocabulary, or a disk that is full.
    """
    clear_drafts(workdir)
    if config.source == "tokens":
        return _prepare_tokens(config, seq_len, vocab_size)
    corpus = stdlib_corpus() if config.source == "stdlib" else text_corpus(config.path)
    with Progress(f"reading {corpus.name}"):
        survey = CorpusSurvey.of(corpus)
    skipped = tuple(f"{path}: {reason}" for path, reason in sorted(corpus.skipped.items()))
    if not survey.hashes.size:
        reasons = "".join(f"\n    {line}" for line in skipped)
        raise DataError(f"{corpus.name} holds no text; name a file with text under data.path{reasons}")

    held, sampled = survey.split(config.validation_fraction)
    identity = digest(survey.digest(), config.validation_fraction)
    given = KnownTokenizer(Path(config.tokenizer).expanduser()) if config.tokenizer else of_weights()
    origin, end = "", ""
    if given:
        tokenizer_path = given.path
        origin, end = given.origin, given.end
    else:
        tokenizer_path = workdir / f"tokenizer-{digest(identity, vocab_size)}.json"
        if not tokenizer_path.exists():
            texts = (text for text, chosen in zip(survey.again(corpus), sampled, strict=True) if chosen)
            train_tokenizer(texts, int(survey.chars[sampled].sum()), vocab_size, tokenizer_path)
    tokenizer = load_tokenizer(tokenizer_path, vocab_size, end)

    fingerprint = digest(identity, tokenizer.digest)
    train = workdir / f"train-marked-{fingerprint}.npy"
    streams = {False: train}
    validation = None
    if held.any():
        validation = workdir / f"validation-marked-{fingerprint}.npy"
        streams[True] = validation
    if not all(is_whole(path) for path in streams.values()):
        num_chars = int(survey.chars.sum())
        standard_error().print(f"tokenizing {num_chars:,} characters of {corpus.name}", markup=False)
        with Progress("tokenizing", num_chars) as progress:
            read = _counted(survey.again(corpus), progress)
            _write_streams(streams, read, tokenizer, held, survey.ends(held))
    return Prepared(
        train=str(train),
        validation=validation,
        tokenizer=tokenizer.path,
        tokenizer_origin=origin,
        end_of_text=tokenizer.end,
        end_id=tokenizer.end_id,
        trained=given is None,
        fingerprint=fingerprint,
        has_checksums=True,
        probe=probe(concat(read_array(train), seq_len)),
        validation_probe=probe(concat(read_array(validation), seq_len)) if validation else "",
        skipped=skipped,
    )


def train_tokenizer(texts: Iterable[str], num_chars: int, vocab_size: int, path: Path) -> None:
    """Train a tokenizer, and say so.

    Args:
        texts: Texts from which merges are learned.
        num_chars: Number of their characters; 0: unknown.
        vocab_size: Most entries.
        path: The `tokenizer.json` to write.
    """
    amount = f" on {num_chars:,} characters" if num_chars else ""
    standard_error().print(f"training a tokenizer of {vocab_size:,} entries{amount}", markup=False)
    with Progress("training a tokenizer: counting words", num_chars) as progress:
        train_bpe(_counted(texts, progress, after="training a tokenizer: merging words"), vocab_size, path)


def _counted(texts: Iterable[str], progress: Progress, after: str = "") -> Iterator[str]:
    """Texts, whose characters progress counts; `after`: the work that follows, of unknown length."""
    num_chars = 0
    for text in texts:
        yield text
        num_chars += len(text)
        progress.show(num_chars)
    if after:
        progress.total = 0
        progress.show(0, after)


def digest(*parts: object) -> str:
    """Short hash of a combination of values, for names of files."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _prepare_tokens(config: DataConfig, seq_len: int, vocab_size: int) -> Prepared:
    names = config.mixture or (config.path,)
    contents, probes = zip(*(_checked_table(config, name, seq_len, vocab_size) for name in names), strict=True)
    identity = [*contents]
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
        has_checksums=False,
        probe=" ".join(probes),
    )


def _checked_table(config: DataConfig, name: str, seq_len: int, vocab_size: int) -> tuple[str, str]:
    """Identity of the content of a token file, and the digest of a sample."""
    path = place_of(name)
    if isinstance(path, S3Path):
        return check_remote(RemoteFile(path, cache_folder(config)), seq_len=seq_len, vocab_size=vocab_size)
    table = _token_table(path, seq_len, vocab_size)
    return check_table(table, path, seq_len=seq_len, vocab_size=vocab_size), probe(table)


def _token_table(path: Path, seq_len: int, vocab_size: int) -> NDArray[Any]:
    try:
        return read_array(path)
    except DataError as error:
        if path.exists():
            raise
        relative = "" if path.is_absolute() else f" (relative to {Path.cwd()})"
        raise DataError(
            f"{error}. data.source=tokens reads rows of train.seq_len + 1 = {seq_len + 1} integer ids below "
            f"{vocab_size} from a .npy file: numpy.save({str(path)!r}, rows){relative}, or set data.path to yours"
        ) from error


def is_whole(path: Path) -> bool:
    """True if an earlier start wrote the file and its checksums, and both can be opened; else they are written again.

    The content is verified when rows are read. Damage of the content is an error then, because a disk may cause it.
    """
    try:
        return path.exists() and read_array(path).nbytes == read_checksums(path).num_bytes > 0
    except DataError:
        return False


def _write_streams(
    paths: Mapping[bool, Path],
    texts: Iterable[str],
    tokenizer: TextTokenizer,
    held: NDArray[np.bool_],
    ends: NDArray[np.bool_],
) -> None:
    """Encode sections into a stream for each side of the split; the marked end token follows every document."""
    encoded = chain.from_iterable(map(tokenizer.encode, _batches(texts)))
    end = np.array([tokenizer.end_id | END_BIT], MARKED)
    with ExitStack() as files:
        append = {side: files.enter_context(writing_tokens(path, MARKED)) for side, path in paths.items()}
        for ids, is_held, is_last in zip(encoded, held, ends, strict=True):
            append[bool(is_held)](ids)
            if is_last:
                append[bool(is_held)](end)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    num_chars = 0
    for text in texts:
        batch.append(text)
        num_chars += len(text)
        if num_chars >= _BATCH_CHARS:
            yield batch
            batch, num_chars = [], 0
    yield batch
