"""Optimizers AdamW and Muon, their update rules, loss scale, and the schedules of learning rate, decay and betas."""
