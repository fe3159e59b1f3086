"""Evaluation of trained models: local tasks that need no network, and those of the lm-evaluation-harness."""
