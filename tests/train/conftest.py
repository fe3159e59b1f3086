"""Ranks for the lane."""

from __future__ import annotations

from tests.support.ranks import ranks

__all__ = ["ranks"]
