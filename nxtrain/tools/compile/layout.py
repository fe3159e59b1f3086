"""Interface of the two layouts of compiled graphs in a cache: PyTorch/XLA's folders and TorchNeuron's files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from pathlib import Path

from nxtrain.tools.compile.entries import CacheKey, Entry
from nxtrain.tools.compile.entry_hashes import Seal


class CacheLayout(ABC):
    """Files of one lane's graphs in a cache."""

    patience_s = 0.0
    """Seconds after which a graph that no process names counts as compiled by the run that watches."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: CacheKey) -> Path:
        """Path of an entry in the cache."""
        return self.root / key.compiler / key.module

    @abstractmethod
    def scan(self, root: Path) -> Iterator[Entry]:
        """Entries of the cache or of its quarantine, sorted; entries that vanish during the scan are left out."""

    @abstractmethod
    def look(self, path: Path, key: CacheKey) -> Entry | None:
        """Entry at a path; None if there is none."""

    @abstractmethod
    def files(self, key: CacheKey) -> list[Path]:
        """Compiled files of a done entry, sorted by name.

        Raises:
            FileNotFoundError: The entry is gone, or is not done.
        """

    @abstractmethod
    def read_seal(self, key: CacheKey) -> Seal | None:
        """Seal of an entry; None if it has none, or one of an earlier compilation.

        Raises:
            FileNotFoundError: The entry is gone, or is not done.
        """

    @abstractmethod
    def write_seal(self, key: CacheKey, seal: Seal) -> None:
        """Write the seal of a complete entry atomically, without marking the entry as used."""

    @abstractmethod
    def publish(self, staged: Path, key: CacheKey, seal: Seal) -> bool:
        """Move a folder's files into the cache in one step; False if the entry's name is in use."""

    @abstractmethod
    def move(self, path: Path, key: CacheKey, target: Path) -> bool:
        """Move an entry out of use; False if a process works on it, or if it is gone. The caller holds the mutex."""

    def unlock(self, path: Path) -> None:
        """Remove the stale locks of an entry."""

    def disown(self, path: Path) -> None:
        """Give up the locks of an entry, which count as stale from now on."""

    @abstractmethod
    def begun(self) -> Iterator[tuple[CacheKey, Hashable]]:
        """Graphs on which compilers work, or have worked, each with the identity of that work."""
