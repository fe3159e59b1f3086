"""Health of a run's numbers: finite values, spikes, equal replicas, skipped steps, recompilations."""
