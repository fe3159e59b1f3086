"""Paths of configurations and commands: expansion of the home folder, and the one rule on addresses.

nxtrain reads and writes buckets of three services by address. Another scheme, or a misspelt address, would otherwise
become the name of a new folder of this machine.
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
"""Command that copies a folder, for Amazon S3, Google Cloud Storage and Azure Blob Storage."""
BUCKET_SCHEMES = tuple(_COPYING)
BUCKET_FORMS = "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX"
"""Forms of an address in object storage, for messages."""
_OTHER_NAMES = {"gcs": "gs", "abfs": "az", "abfss": "az", "azure": "az", "wasb": "az", "wasbs": "az"}
"""Names of the same services in other tools."""

_SCHEME = re.compile(r"([a-z0-9][a-z0-9+.-]*):/|(s3)(?::|/[:/])", re.IGNORECASE)
"""Begin of an address: `scheme:/`, as a path keeps only one of several slashes; and misspelt forms of `s3://`."""


def scheme_of(path: str) -> str:
    """Scheme of an address; empty for a path of this machine."""
    match = _SCHEME.match(path)
    if match is None:
        return ""
    return match[1] or match[2]


def is_bucket(text: str) -> bool:
    """True for an address in object storage."""
    return text.startswith(tuple(f"{scheme}://" for scheme in BUCKET_SCHEMES))


def listing(address: str) -> str:
    """Command of the service's own tool that lists an address in object storage."""
    scheme, _, rest = address.partition("://")
    if scheme == "az":
        container, _, prefix = rest.partition("/")
        return f"az storage blob list --container-name {container} --prefix '{prefix}'"
    tool = "aws s3 ls" if scheme == "s3" else "gcloud storage ls"
    return f"{tool} {address}"


def copying(address: str, arguments: str) -> str:
    """Command of the service's own tool that copies a folder from or to an address in object storage."""
    return f"{_COPYING[scheme_of(address)]} {arguments}"


def at_home(path: str) -> str:
    """Replace a leading `~` or `~user` by the home folder; addresses such as `s3://bucket` are not changed."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise ValueError(f"no user of this machine is called {user[1:]}; write ./{path} for a file of that name")
    return expanded


def local(path: str) -> str:
    """Expand the home folder in a path; refuse addresses."""
    scheme = scheme_of(path)
    if scheme:
        fetch = "the tool of its service"
        if is_bucket(path):
            fetch = copying(path, "ADDRESS FOLDER")
        elif scheme == "hf":
            fetch = "hf download, or make a corpus of it: nxtrain data prepare"
        raise ValueError(f"an address of {scheme}, but a path of this machine is read; fetch it with: {fetch}")
    return at_home(path)


def local_or_bucket(path: str) -> str:
    """Expand the home folder in a path; accept addresses in object storage, and refuse others."""
    if is_bucket(path):
        return path
    return local(path)


def model_location(path: str) -> str:
    """Expand the home folder in a path, or accept a name in the Hub of Hugging Face; refuse other addresses."""
    if not path.startswith(HUB):
        return local(path)
    try:
        model_named(path)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return path


def storage(path: str) -> str:
    """Expand the home folder in a path, or accept an address in object storage, for a location that is also written."""
    if is_bucket(path):
        return path
    scheme = scheme_of(path)
    if scheme:
        raise ValueError(
            f"an address of {scheme}, and nxtrain has access to folders and to {BUCKET_FORMS} only; "
            f"use one of these{_meant(path, scheme)}"
        )
    return at_home(path)


def _meant(path: str, scheme: str) -> str:
    """Hint for a misspelt address in object storage, or for a path written as an address; empty for other paths."""
    rest = path[len(scheme) :].lstrip(":/")
    meant = get_close_matches(scheme.lower(), [*_COPYING, *_OTHER_NAMES], n=1)
    if meant:
        return f"; did you mean {_OTHER_NAMES.get(meant[0], meant[0])}://{rest}?"
    if scheme.lower() == "file":
        return f"; did you mean /{rest}?"
    return ""


def storage_path(text: str) -> Path:
    """Path as `storage` returns, which is not an address in object storage."""
    return _path(text, storage)


def local_path(text: str) -> Path:
    """Path given to a command, with the home folder expanded."""
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
