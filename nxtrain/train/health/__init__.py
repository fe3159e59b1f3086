"""Health of the numbers: finite values, spikes, equal replicas, recompilations."""
