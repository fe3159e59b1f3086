"""AdamW and Muon, their update rules, and the learning rate."""
