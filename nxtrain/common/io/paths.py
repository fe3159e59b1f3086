"""Paths of configurations and commands: expansion of the home folder, and the one rule on addresses.

S3 is the only storage that nxtrain reads and writes by address. Another scheme, or a misspelt address, would otherwise
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

_SCHEME = re.compile(r"([a-z0-9][a-z0-9+.-]*):/|(s3)(?::|/[:/])", re.IGNORECASE)
"""Begin of an address: `scheme:/`, as a path keeps only one of several slashes; and misspelt forms of `s3://`."""


def scheme_of(path: str) -> str:
    """Scheme of an address; empty for a path of this machine."""
    match = _SCHEME.match(path)
    if match is None:
        return ""
    return match[1] or match[2]


def at_home(path: str) -> str:
    """Replace a leading `~` or `~user` by the home folder; addresses such as `s3://bucket` are not changed."""
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise ValueError(f"{user} is the home folder of nobody on this machine; write ./{path} for a file of that name")
    return expanded


def local(path: str) -> str:
    """Expand the home folder in a path; refuse addresses."""
    scheme = scheme_of(path)
    if scheme:
        fetch = "the tool of its service"
        if scheme == "s3":
            fetch = "aws s3 sync ADDRESS FOLDER"
        elif scheme == "hf":
            fetch = "hf download, or make a corpus of it: nxtrain data prepare"
        raise ValueError(f"an address of {scheme}, but a path of this machine is read; fetch it with: {fetch}")
    return at_home(path)


def local_or_bucket(path: str) -> str:
    """Expand the home folder in a path; accept addresses of S3, and refuse addresses of other services."""
    if path.startswith("s3://"):
        return path
    return local(path)


def model_place(path: str) -> str:
    """Expand the home folder in a path, or accept a name in the Hub of Hugging Face; refuse other addresses."""
    if not path.startswith(HUB):
        return local(path)
    try:
        model_named(path)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return path


def storage(path: str) -> str:
    """Expand the home folder in a path, or accept an address of S3, for a location that is also written."""
    if path.startswith("s3://"):
        return path
    scheme = scheme_of(path)
    if scheme:
        raise ValueError(
            f"an address of {scheme}, and nxtrain has access to folders and to s3://BUCKET/PREFIX only; "
            f"use one of these{_meant(path, scheme)}"
        )
    return at_home(path)


def _meant(path: str, scheme: str) -> str:
    """Hint for a misspelt S3 address, or for a path written as an address; empty for other paths."""
    rest = path[len(scheme) :].lstrip(":/")
    if get_close_matches(scheme.lower(), ["s3"]):
        return f"; did you mean s3://{rest}?"
    if scheme.lower() == "file":
        return f"; did you mean /{rest}?"
    return ""


def storage_path(text: str) -> Path:
    """Path as `storage` returns, which is not an address in S3."""
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
