"""File systems of a few pages or megabytes, which really are full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A folder on a file system of its own; skips the test where none can be mounted."""
    folder.mkdir(parents=True)
    mount = ("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(folder))
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a tmpfs, and not in every container; runs as root on Linux")
    try:
        yield folder
    finally:
        subprocess.run(("umount", "--lazy", str(folder)), check=True)
