"""Processes, runs and stand-ins for vendors that tests share, and the paths of the repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY, DEMO = ROOT / "configs" / "tiny_cpu.toml", ROOT / "configs" / "demo.toml"
