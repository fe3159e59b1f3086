"""Generation, and evaluation by local tasks and by the lm-evaluation-harness."""
