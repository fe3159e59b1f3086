"""Text generation, and evaluation of models by local tasks and by the lm-evaluation-harness."""
