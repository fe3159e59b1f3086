"""Files of a Hugging Face Hub data set as sources of a corpus: `hf://org/name[/pattern][@revision]`.

The files of one commit are downloaded into the cache of the Hub's client. A prepared corpus records the commit, and the
same command continues with the recorded commit.
"""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from nxtrain.common.errors import ConfigError, DataError, Problem
from nxtrain.common.io.hub import SCHEME, HubName

_ADDRESS = re.compile(r"hf://(?:datasets/)?([A-Za-z0-9][\w.-]*/[\w.-]+)(?:/([^@]*))?(?:@(\S+))?")

_ENDINGS = (".jsonl", ".ndjson", ".parquet", ".pq", ".arrow", ".feather", ".ipc", ".txt", ".text")
_COMPRESSED = (".gz", ".zst", ".zstd")

_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in file paths that identify a split. Source: datasets 5.2, data_files.py, SPLIT_KEYWORDS."""


@dataclass(frozen=True)
class HubAddress:
    """Address of files in a Hub data set, as given on the command line.

    Args:
        name: The data set, with the revision of the address.
        pattern: File, folder, or glob in which `*` matches inside one folder and `**` across folders; empty for all
            data files.
    """

    name: HubName
    pattern: str = ""

    @staticmethod
    def parse(text: str) -> HubAddress:
        """Parse an address that begins with `hf://`.

        Raises:
            ConfigError: The address names no files of a data set.
        """
        match = _ADDRESS.fullmatch(text)
        if match is None:
            hint = f"write {SCHEME}org/name, {SCHEME}org/name/*.parquet or {SCHEME}org/name/data@revision"
            raise ConfigError([Problem("", f"{text} names no files of a data set", hint=hint)])
        return HubAddress(HubName(match[1], match[3] or "", "dataset"), (match[2] or "").strip("/"))

    def __str__(self) -> str:
        """Text of the address, with the revision at the end."""
        path, revision = "", ""
        if self.pattern:
            path = f"/{self.pattern}"
        if self.name.revision:
            revision = f"@{self.name.revision}"
        return f"{SCHEME}{self.name.repository}{path}{revision}"

    def fetch(self, only: str, recorded: Iterable[str], print_line: Callable[[str], None]) -> HubFiles:
        """Download the files that the address selects.

        Args:
            only: Pattern that the file names must match; empty for all.
            recorded: Addresses with commits from an earlier call of the same preparation.
            print_line: Prints a line before a download.

        Raises:
            ConfigError: There is no such data set, revision or file, or the user has no access to the files.
            DataError: The files belong to several splits, and no pattern chooses.
            StorageError: The Hub cannot be reached, or the disk has not enough space.
        """
        pinned = self._pinned(recorded)
        sizes = pinned.name.sizes()
        chosen = [file for file in sorted(sizes) if self._chooses(file)]
        chosen = [file for file in chosen if not only or fnmatch.fnmatch(PurePosixPath(file).name, only)]
        if not chosen:
            reason = f"{pinned} has no file that matches"
            hint = f"look at {pinned.name.page}/tree/{pinned.name.revision}; its data may need a loading script"
            raise ConfigError([Problem("", reason, hint=hint)])
        if not self.pattern and not only:
            _refuse_splits(pinned, chosen)
        folder = pinned.name.fetch({file: sizes[file] for file in chosen}, print_line)
        return HubFiles(pinned, folder, tuple(chosen))

    def _pinned(self, recorded: Iterable[str]) -> HubAddress:
        if self.name.is_pinned:
            return self
        for text in recorded:
            earlier = HubAddress.parse(text)
            if (earlier.name.repository, earlier.pattern) == (self.name.repository, self.pattern):
                return earlier
        return replace(self, name=self.name.pinned())

    def _chooses(self, file: str) -> bool:
        if not self.pattern:
            plain = file.lower()
            for ending in _COMPRESSED:
                plain = plain.removesuffix(ending)
            return plain.endswith(_ENDINGS) and not _is_hidden(file)
        if file == self.pattern:
            return True
        if file.startswith(f"{self.pattern}/"):
            return not _is_hidden(file)
        words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        parts = re.split(r"(\*\*/|\*\*|\*|\?)", self.pattern)
        regex = "".join(words.get(part, re.escape(part)) for part in parts)
        return re.fullmatch(regex, file) is not None


@dataclass(frozen=True)
class HubFiles:
    """Downloaded files of a data set's commit, in this machine's cache.

    Args:
        address: Address, pinned to the commit.
        folder: Folder of the commit.
        files: Paths of the files in the folder, sorted.
    """

    address: HubAddress
    folder: Path
    files: Sequence[str]


def _is_hidden(file: str) -> bool:
    return "/." in f"/{file}"


def _refuse_splits(address: HubAddress, files: Iterable[str]) -> None:
    """Raise a DataError for files of several splits, so that a test split is never trained on by accident."""
    by_split: dict[str, list[str]] = defaultdict(list)
    for file in files:
        parts = set(re.split(r"[^a-z]+", file.lower()))
        for split, words in _SPLITS.items():
            if not parts.isdisjoint(words):
                by_split[split].append(file)
    if len(by_split) < 2:  # noqa: PLR2004 - one split, or none that names tell
        return
    shown = ", ".join(f"{split}: {names[0]}" for split, names in by_split.items())
    example = re.sub(r"[-_.]?\d.*", "*", by_split[min(by_split, key=list(_SPLITS).index)][0])
    raise DataError(
        f"{address} has files of several splits ({shown}); give one of them: "
        f"{SCHEME}{address.name.repository}/{example}@{address.name.revision}"
    )
