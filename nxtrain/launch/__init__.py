"""Starting the ranks of a run: each target renders a command over torchrun."""
