"""Repositories of the Hugging Face Hub: names, commits, and files in the cache of the Hub's own client.

A commit identifies the content of a repository. Files of a commit are fetched once per machine. The first process that
needs a file holds a lock, and other processes then find the file in the cache. The client reads HF_ENDPOINT, HF_HOME,
HF_TOKEN and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from nxtrain.common.errors import FULL, ConfigError, NxtrainError, Problem, StorageError, more_room, refused
from nxtrain.common.io.atomic import replace_text
from nxtrain.common.text import listed, size

SCHEME = "hf://"

DEFAULT_REVISION = "main"

RUNS = "runs"
"""Default parent folder of run folders. `runs/NAME` is always a local path, never a repository of the Hub."""

_REPOSITORY = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
"""Pattern of a repository name: organization or user, slash, name."""

_COMMIT = re.compile("[0-9a-f]{40}")

_TRANSPORTS = frozenset({"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3"})
"""HTTP packages that some release of the Hub's client uses; the client raises their errors."""

_TIMEOUT_S = 30.0
"""Timeout in seconds of a request for information on a repository."""

_BUSY = (408, 429)
"""HTTP statuses below 500 that may be temporary: timeout and too many requests."""

_SHOWN = 3
"""Maximum number of files that a message names."""

PrintLine = Callable[[str], None]
"""Function that prints a line for the user."""


@dataclass(frozen=True)
class HubName:
    """Name of a repository of the Hugging Face Hub, with an optional revision.

    Args:
        repository: `organization/name`.
        revision: Branch, tag or commit; empty for the newest commit of the default branch.
        kind: Kind of repository. A model and a dataset may have the same name.
    """

    repository: str
    revision: str = ""
    kind: Literal["model", "dataset"] = "model"

    def __str__(self) -> str:
        """Name of the repository with its revision, as written in configurations."""
        if not self.revision:
            return self.repository
        return f"{self.repository}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit hash, whose files never change."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def folder(self) -> Path:
        """Folder of the commit in this machine's Hub cache, which has the files fetched so far.

        Source: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
        """
        return self._cached / "snapshots" / self.revision

    @property
    def page(self) -> str:
        """URL of the repository on the Hub."""
        from huggingface_hub import constants

        prefix = ""
        if self.kind == "dataset":
            prefix = "datasets/"
        return f"{constants.ENDPOINT}/{prefix}{self.repository}"

    def pinned(self) -> HubName:
        """Resolve the revision to a commit, and return the name with this commit.

        Raises:
            ConfigError: The Hub has no such repository or revision for this user.
            StorageError: The Hub cannot be reached.
        """
        if self.is_pinned:
            return self
        if is_offline():
            revision = self.revision or DEFAULT_REVISION
            try:
                commit = self._reference.read_text(encoding="utf-8").strip()
            except OSError:
                raise self._refusal(
                    f"the cache in {self._cached} has no revision {revision}, and HF_HUB_OFFLINE is set",
                    f"fetch with a network: hf download {self.repository}{self._option} --revision {revision}",
                ) from None
            return replace(self, revision=commit)
        with self._explained():
            about = self._ask(files_metadata=False)
        # Recorded for starts without network; the client records only the commits that it fetches by.
        if ".." not in Path(self.revision).parts:
            with suppress(OSError):  # the cache may be shared and not writable
                self._reference.parent.mkdir(parents=True, exist_ok=True)
                replace_text(self._reference, about.sha, durable=False)
        return replace(self, revision=about.sha)

    def sizes(self) -> dict[str, int]:
        """Size in bytes of each file of a commit, by path. Offline, only the files in the cache."""
        if is_offline():
            files = [path for path in self.folder.rglob("*") if path.is_file()]
            return {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in sorted(files)}
        with self._explained():
            about = self._ask(files_metadata=True)
        return {file.rfilename: file.size or 0 for file in about.siblings or ()}

    def fetch(self, files: Mapping[str, int], print_line: PrintLine | None = None) -> Path:
        """Download the files of a commit that are missing in the cache.

        Args:
            files: Size in bytes of each file, by path; 0 if unknown.
            print_line: Prints a line before a download.

        Returns:
            Folder of the commit in the cache.

        Raises:
            ConfigError: The user has no access to the files, or HF_HUB_OFFLINE is set and the cache lacks some.
            StorageError: The Hub cannot be reached, or the disk has not enough space.
        """
        absent = self._absent(files)
        if not absent:
            return self.folder
        if is_offline():
            raise self._refusal(
                f"the cache in {self._cached} lacks {listed(absent, _SHOWN)}, and HF_HUB_OFFLINE is set",
                f"fetch with a network: hf download {self.repository}{self._option} --revision {self.revision}",
            )
        from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

        with self._explained():
            self._cached.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(self._cached / ".nxtrain.lock"):
                absent = self._absent(files)  # another process may have fetched them in the meantime
                if absent:
                    self._download(absent, print_line)
        absent = self._absent(files)
        if absent:
            raise StorageError(f"download of {self} lacks {listed(absent, _SHOWN)}; start again, or see {self.page}")
        return self.folder

    @property
    def _cached(self) -> Path:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        name = repo_folder_name(repo_id=self.repository, repo_type=self.kind)
        return Path(constants.HF_HUB_CACHE).expanduser() / name

    @property
    def _option(self) -> str:
        if self.kind == "dataset":
            return " --repo-type dataset"
        return ""

    def _ask(self, *, files_metadata: bool) -> Any:
        """Request information on the repository at its revision from the Hub."""
        from huggingface_hub import HfApi

        return HfApi().repo_info(
            self.repository,
            repo_type=self.kind,
            revision=self.revision or None,
            timeout=_TIMEOUT_S,
            files_metadata=files_metadata,
        )

    @property
    def _reference(self) -> Path:
        """File of the Hub cache that records the commit of a branch or tag."""
        return self._cached / "refs" / (self.revision or DEFAULT_REVISION)

    def _absent(self, files: Mapping[str, int]) -> dict[str, int]:
        return {file: num_bytes for file, num_bytes in files.items() if not (self.folder / file).is_file()}

    def _download(self, files: Mapping[str, int], print_line: PrintLine | None) -> None:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

        class HubBar(tqdm):
            """Bars of the client, on terminals only; a log would get a line for each change."""

            def __init__(self, *words: Any, **settings: Any) -> None:
                super().__init__(*words, **{**settings, "disable": not sys.stderr.isatty()})

        needed = sum(files.values())
        existing = next(folder for folder in (self._cached, *self._cached.parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise StorageError(
                f"{self} needs {size(needed)}, and the disk of {self._cached} has {size(free)} free; free some, or "
                "name a folder on another disk with HF_HOME"
            )
        if print_line is not None:
            amount = ""
            if needed:
                amount = f", {size(needed)},"
            print_line(f"fetches {listed(files, _SHOWN)} of {self}{amount} into {self.folder}")
        snapshot_download(
            self.repository,
            repo_type=self.kind,
            revision=self.revision,
            allow_patterns=[glob.escape(file) for file in files],
            tqdm_class=HubBar,
        )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Context that translates errors of the Hub's client into errors of nxtrain."""
        try:
            yield
        except NxtrainError:
            raise
        except Exception as error:
            explained = self._explanation(error)
            if explained is None:
                raise
            raise explained from error

    def _explanation(self, error: Exception) -> NxtrainError | None:
        from huggingface_hub import constants, errors

        if isinstance(error, errors.GatedRepoError):
            reason = f"{self.repository} is gated, and this user has no access"
            return self._refusal(reason, f"ask for access at {self.page}, then log in: hf auth login, or set HF_TOKEN")
        if isinstance(error, errors.RepositoryNotFoundError):
            reason = f"the Hub has no {self.kind} {self.repository}, or it is private"
            return self._refusal(reason, "check the name; for a private one log in: hf auth login, or set HF_TOKEN")
        if isinstance(error, errors.RevisionNotFoundError):
            reason = f"{self.repository} has no revision {self.revision}"
            return self._refusal(reason, f"take a branch, a tag or a commit of {self.page}/commits")
        if isinstance(error, errors.HFValidationError):
            return self._refusal(f"{self.repository} does not name a repository: {error}", "write org/name[@revision]")
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status in {401, 403}:
            reason = f"the Hub refuses the token of this user for {self.repository}, status {status}"
            return self._refusal(reason, "log in: hf auth login, or set HF_TOKEN to a token that may read it")
        if isinstance(error, OSError) and error.errno in FULL:
            way_out = f"{more_room(error.errno)}, or name a folder on another disk with HF_HOME"
            kept = f"{self._cached} keeps the finished files"
            return StorageError(f"a file cannot be written while {self} downloads: {error.strerror}; {way_out}; {kept}")
        is_network = isinstance(error, errors.HfHubHTTPError | errors.LocalEntryNotFoundError | ConnectionError)
        if is_network or type(error).__module__.partition(".")[0] in _TRANSPORTS or status in _BUSY:
            return StorageError(
                f"the Hub does not send {self} from {constants.ENDPOINT}: {_reason(error)}; start again when it "
                "answers, or set HF_HUB_OFFLINE=1 to take the files of the cache"
            )
        if isinstance(error, OSError):
            return refused(error)
        return None

    def _refusal(self, reason: str, hint: str) -> ConfigError:
        return ConfigError([Problem("", reason, hint=hint)])


def _reason(error: Exception) -> str:
    """Text of the system error below a network error; without one, the first line of the network error.

    The messages of HTTP packages contain objects, addresses in memory, and other messages.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return str(error).strip().partition("\n")[0] or type(error).__name__


def model_named(text: str) -> HubName | None:
    """Parse the name of a Hub model: `org/name`, `org/name@revision`, optionally with `hf://`. None for a local path.

    An existing file or folder of this machine takes precedence over the Hub. If the first part is an existing folder or
    the folder of runs, the name counts as a misspelt path. A commit after the name makes it a Hub name again.

    Raises:
        ConfigError: An `hf://` address that names no repository.
    """
    named = text.removeprefix(SCHEME)
    match = re.fullmatch(rf"({_REPOSITORY})(?:@(\S+))?", named)
    if named != text:
        if match is None:
            raise ConfigError([Problem("", f"{text} names no repository", hint=f"write {SCHEME}org/name[@revision]")])
        return HubName(match[1], match[2] or "")
    if match is None or os.path.lexists(text):
        return None
    name = HubName(match[1], match[2] or "")
    first = text.partition("/")[0]
    if (first == RUNS or os.path.isdir(first)) and not name.is_pinned:
        return None
    return name


def is_offline() -> bool:
    """True if HF_HUB_OFFLINE forbids requests to the Hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)
