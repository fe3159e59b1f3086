"""AdamW, its update rules, and the learning rate."""
