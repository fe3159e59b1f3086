"""Start of a run: environment, torchrun, and files for clusters."""
