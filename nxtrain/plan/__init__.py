"""Predictions of a run's step time, device memory, communication and cost, before the run (`nxtrain plan`)."""
