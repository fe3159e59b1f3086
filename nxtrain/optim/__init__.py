"""The update: AdamW and its learning rate."""
