"""Paths in configurations and commands: expansion of `~`, and acceptance or refusal of object storage addresses.

nxtrain reads and writes buckets of three storage services. Without a check, another scheme or a misspelt address would
become the name of a new local folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from nxtrain.common.errors import ConfigError
from nxtrain.common.io.hub import SCHEME as HUB
from nxtrain.common.io.hub import model_named

_COPYING = {"s3": "aws s3 sync", "gs": "gcloud storage rsync --recursive", "az": "azcopy sync"}
"""Shell command that copies a folder, for Amazon S3, Google Cloud Storage and Azure Blob Storage."""
BUCKET_SCHEMES = tuple(_COPYING)
BUCKET_FORMS = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"
"""Syntax of object storage addresses, for messages."""
_OTHER_NAMES = {"gcs": "gs", "abfs": "az", "abfss": "az", "azure": "az", "wasb": "az", "wasbs": "az"}
"""Schemes of the same storage services in other tools."""

_SCHEME = re.compile(r"([a-z0-9][a-z0-9+.-]*):/|(s3)(?::|/[:/])", re.IGNORECASE)
"""Pattern of the beginning of an address.

`scheme:/` has one slash, since a path keeps only one of several slashes. Misspelt forms of `s3://` match too.
"""


def scheme_of(path: str) -> str:
    """Scheme of an address, such as `s3`; empty for a local path."""
    match = _SCHEME.match(path)
    if match is None:
        return ""
    return match[1] or match[2]


def is_bucket(text: str) -> bool:
    """True for an object storage address, which begins with `s3://`, `gs://` or `az://`."""
    return text.startswith(tuple(f"{scheme}://" for scheme in BUCKET_SCHEMES))


def listing(address: str) -> str:
    """Shell command of the vendor's tool that lists an object storage address."""
    scheme, _, rest = address.partition("://")
    if scheme == "az":
        container, _, prefix = rest.partition("/")
        return f"az storage blob list --container-name {container} --prefix '{prefix}'"
    tool = "aws s3 ls" if scheme == "s3" else "gcloud storage ls"
    return f"{tool} {address}"


def copying(address: str, arguments: str) -> str:
    """Shell command of the vendor's tool that copies a folder from or to an object storage address."""
    return f"{_COPYING[scheme_of(address)]} {arguments}"


def expand_home(path: str) -> str:
    """Expand a leading `~` or `~user` of a path. Addresses such as `s3://bucket` stay unchanged.

    Raises:
        ValueError: There is no such user.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise ValueError(f"no user of this machine is called {user[1:]}; write ./{path} for a file of that name")
    return expanded


def local(path: str) -> str:
    """Expand `~` in a local path, and raise a ValueError for any address."""
    scheme = scheme_of(path)
    if scheme:
        fetch = "the tool of its service"
        if is_bucket(path):
            fetch = copying(path, "ADDRESS FOLDER")
        elif scheme == "hf":
            fetch = "hf download, or make a corpus of it: nxtrain data prepare"
        raise ValueError(f"an address of {scheme}, but only a local path can be read here; fetch it with: {fetch}")
    return expand_home(path)


def local_or_bucket(path: str) -> str:
    """Expand `~` in a local path, or accept an object storage address for reading; refuse other addresses.

    Raises:
        ValueError: An address of another kind.
    """
    if is_bucket(path):
        return path
    return local(path)


def model_location(path: str) -> str:
    """Expand `~` in a local path, or accept the `hf://` name of a model; refuse other addresses.

    Raises:
        ValueError: An address of another kind, or a malformed `hf://` name.
    """
    if not path.startswith(HUB):
        return local(path)
    try:
        model_named(path)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return path


def storage(path: str) -> str:
    """Expand `~` in a local path, or accept an object storage address for reading and writing.

    Raises:
        ValueError: An address of another kind.
    """
    if is_bucket(path):
        return path
    scheme = scheme_of(path)
    if scheme:
        rest = path[len(scheme) :].lstrip(":/")
        hint = "use one of these"
        meant = get_close_matches(scheme.lower(), [*_COPYING, *_OTHER_NAMES], n=1)
        if meant:
            hint += f"; did you mean {_OTHER_NAMES.get(meant[0], meant[0])}://{rest}?"
        elif scheme.lower() == "file":
            hint += f"; did you mean /{rest}?"
        raise ValueError(
            f"an address of {scheme}, and nxtrain has access to folders and to {BUCKET_FORMS} only; {hint}"
        )
    return expand_home(path)


def storage_path(text: str) -> Path:
    """Parse a path with `storage`, as a `Path`; the text must not be an object storage address."""
    return _path(text, storage)


def local_path(text: str) -> Path:
    """Parse a local path that was given to a command; `~` is expanded."""
    return _path(text, local)


def _path(text: str, rule: Callable[[str], str]) -> Path:
    if not text:
        raise ConfigError("a path is empty, perhaps by a variable that is not set; give one, or . for this folder")
    try:
        return Path(rule(text))
    except ValueError as error:
        if scheme_of(text):
            raise ConfigError(f"{text}: {error}") from error
        raise ConfigError(str(error)) from error
