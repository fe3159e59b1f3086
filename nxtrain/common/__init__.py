"""Plain data, contracts and errors that every package of nxtrain uses."""

from __future__ import annotations
