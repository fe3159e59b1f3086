"""One run: assembly, the training step, evaluation, checkpoints, the end."""
