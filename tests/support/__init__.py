"""Processes, runs and stand-ins for vendors that tests share, and the paths of the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY, DEMO = ROOT / "configs" / "tiny_cpu.toml", ROOT / "configs" / "demo.toml"


def leave_metadata(site: Path, name: str, version: str, description: str = "") -> None:
    """Make a package of this version known to importlib.metadata, in a folder that may have it."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\n{description}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
