"""Hangs, stragglers, coordinated stops, crash loops, one run per folder."""
