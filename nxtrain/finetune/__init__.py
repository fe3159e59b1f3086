"""Fine-tuning of given weights by low-rank adapters."""
