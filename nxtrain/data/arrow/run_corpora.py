"""Corpora of a run: prepared corpora, or a corpus that the run makes of text or of the standard library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nxtrain.common.errors import DataError
from nxtrain.common.io.jsonl import read
from nxtrain.common.io.object_store import place_of
from nxtrain.common.process.progress import Progress
from nxtrain.data.arrow.preparation import OnBad, PreparationRequest, Watcher, prepare_sources
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.data.arrow.sources import Source, find_sources, fingerprint, versions
from nxtrain.data.arrow.streams import content_hash
from nxtrain.data.arrow.token_stream import opened_before
from nxtrain.data.arrow.work import Counts, Outputs
from nxtrain.data.corpora import stdlib_files, text_files
from nxtrain.data.mixture import Mixture
from nxtrain.data.prepare import digest
from nxtrain.data.storage import cache_folder, refusing

if TYPE_CHECKING:
    from nxtrain.config.schema import DataConfig

_SKIPPED: dict[str, OnBad] = {"stdlib": "skip", "text": "skip binary"}
"""Treatment of unusable files: folders of text hold pictures too, and some modules of the library are not UTF-8."""


@dataclass(frozen=True)
class RunCorpora:
    """Corpora of a run.

    Args:
        mixture: Their shares of the rows; None for one corpus.
        fraction: `data.validation_fraction`.
        is_text: The run has made the corpus of text or of the standard library.
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

    @cached_property
    def held_out(self) -> float:
        """Bound of the hashes below which documents are held out, as a share of all hashes.

        Few documents may have no hash below the fraction itself. Those of text are therefore held out in ascending
        order of their hashes until they hold the fraction of the text.
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
        """Parts of a number in proportion to the shares of the corpora; their sum is at least the number."""
        if self.mixture is None:
            return [total]
        return [-(-total * share // self.mixture.period) for share in self.mixture.shares]


def open_corpora(config: DataConfig, workdir: Path) -> RunCorpora:
    """Open the corpora of a run; text becomes a corpus in a folder first.

    Args:
        workdir: Folder of the corpus of text.
    """
    if config.source != "arrow":
        return _text_corpus(config, workdir)
    if not config.mixture:
        return RunCorpora([open_corpus(config, config.path, "data.path")], None, config.validation_fraction)
    corpora = [open_corpus(config, name, "data.mixture") for name in config.mixture]
    return RunCorpora(corpora, Mixture.of(config.mixture, config.weights), config.validation_fraction)


def open_corpus(config: DataConfig, name: str, key: str) -> PreparedCorpus:
    """Open a prepared corpus that a configuration names under a key."""
    path = place_of(name)
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
    """Progress of the preparation of text, and its first skipped files."""

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
    """Make the corpus of text or of the standard library, unless it exists; an unfinished corpus is continued."""
    name, skipped = config.path, list[str]()
    if config.source == "stdlib":
        name, files = "the standard library", stdlib_files()
    else:
        walked = text_files(config.path)
        files = walked.files
        skipped = [f"{path}: {reason}" for path, reason in walked.skipped.items()]
    sources = find_sources(files, any_text=True)
    out = workdir / f"corpus-{digest(fingerprint(sources), versions(sources))}.arrow"
    request = PreparationRequest(files, out, on_bad=_SKIPPED[config.source], sections=True)
    corpus = opened_before(out) or _make(request, sources, name)
    bad = Outputs(out).bad
    if bad.exists():
        skipped.extend(f"{line['file']}: {line['reason']}: {line['detail']}" for line in read(bad))
    return RunCorpora([corpus], None, config.validation_fraction, True, name, tuple(skipped))


def _make(request: PreparationRequest, sources: Sequence[Source], name: str) -> PreparedCorpus:
    outputs = Outputs(request.out)
    with refusing(request.out), Progress(f"reading {name}") as progress:
        if request.out.exists():  # a damaged corpus
            outputs.clear()
        watcher = _TextWatcher(progress)
        try:
            prepare_sources(request, sources, watcher)
        except DataError as error:
            outputs.clear_work()  # changed files have another name at the next start
            listed = "".join(f"\n    {line}" for line in watcher.skipped)
            raise DataError(f"{name}: {error}{listed}") from error
    return PreparedCorpus(request.out)
