"""Work around a run."""

from __future__ import annotations
