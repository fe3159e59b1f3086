"""Optimizer: AdamW, its update rules and its learning rate."""
