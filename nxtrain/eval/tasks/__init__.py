"""Tasks of our own for the lm-evaluation-harness: its YAML, and the functions that the YAML names."""
