"""Expansion of the home folder in paths of configurations and commands."""

from __future__ import annotations

import os


def at_home(path: str) -> str:
    """Replace a leading `~` or `~user` by the home folder; addresses such as `s3://bucket` stay.

    Raises:
        ValueError: There is no such user.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        user = expanded.partition("/")[0]
        raise ValueError(f"{user} is the home folder of nobody on this machine; write ./{path} for a file of that name")
    return expanded
