"""Plain data, contracts and errors that every room uses."""

from __future__ import annotations
