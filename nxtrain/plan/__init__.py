"""Predictions of time, memory, traffic and cost, before a run."""
