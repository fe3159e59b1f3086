"""Checks of a run's health: finite numbers, spikes, equal replicas, recompilations, host fallbacks, memory."""
