"""Data classes, interfaces and errors that every package of nxtrain imports."""

from __future__ import annotations
