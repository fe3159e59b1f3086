"""Supervision of a run: hangs, stragglers, coordinated stops, crash loops, one run per folder."""
