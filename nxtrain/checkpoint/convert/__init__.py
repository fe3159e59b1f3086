"""Conversion of checkpoints from and to the formats of Hugging Face and NeuronX Distributed."""
