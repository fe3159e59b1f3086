"""Expansion of the home folder in paths of configurations and commands."""

from __future__ import annotations

import os
import re
from pathlib import Path

from nxtrain.errors import ConfigError


def at_home(path: str) -> str:
    """Replace a leading `~` or `~user` by the home folder; addresses such as `s3://bucket` are not changed.

    Raises:
        ValueError: There is no such user.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise ValueError(f"{user} is the home folder of nobody on this machine; write ./{path} for a file of that name")
    return expanded


def local(path: str) -> str:
    """Expand the home folder in a path; refuse addresses of other machines.

    Raises:
        ValueError: There is no such user, or the path is an address.
    """
    if found := re.match(r"([a-z][a-z0-9+.-]*):/+(?=[^/])", path):
        fetch = "aws s3 sync ADDRESS FOLDER" if found[1] == "s3" else "the tool of its service"
        raise ValueError(f"an address of {found[1]}, but a path of this machine is read; fetch it with: {fetch}")
    return at_home(path)


def local_or_bucket(path: str) -> str:
    """Expand the home folder in a path; accept addresses of S3, and refuse those of other services.

    Raises:
        ValueError: There is no such user, or the path is an address of another service.
    """
    return path if path.startswith("s3://") else local(path)


def local_path(text: str) -> Path:
    """Path given to a command, with the home folder expanded.

    Raises:
        ConfigError: The path is empty, or begins with `~user` for a user that does not exist.
    """
    if not text:
        raise ConfigError("a path is empty, perhaps by a variable that is not set; give one, or . for this folder")
    try:
        return Path(at_home(text))
    except ValueError as error:
        raise ConfigError(str(error)) from error
