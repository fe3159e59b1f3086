"""Metadata of packages as pip leaves it, for packages that are not installed."""

from __future__ import annotations

from pathlib import Path


def leave_metadata(site: Path, name: str, version: str, description: str = "") -> None:
    """Make a package of this version known to importlib.metadata, in a folder that may have it."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\n{description}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
