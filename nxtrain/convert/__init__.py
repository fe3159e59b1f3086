"""Conversions between checkpoints of nxtrain, Hugging Face and NeuronX Distributed."""
