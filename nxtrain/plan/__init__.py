"""Predictions of a run's time, memory and traffic, computed before the run starts."""
