"""Launch of a run: environment variables of ranks, the torchrun agent, and job files for clusters."""
