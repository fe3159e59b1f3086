"""Conversions from and to Hugging Face and NeuronX Distributed."""
