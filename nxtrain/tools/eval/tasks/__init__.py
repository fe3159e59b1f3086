"""Tasks for the lm-evaluation-harness: YAML, and the functions that the YAML names."""
