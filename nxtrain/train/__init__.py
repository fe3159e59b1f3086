"""A training run: assembly, training step, evaluation, checkpoints, and the end of the run."""
