"""Supervision of a run: hangs, stragglers, coordinated stops, crash loops, and one run per folder."""
