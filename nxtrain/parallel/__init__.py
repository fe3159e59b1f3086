"""Tensor, sequence, pipeline and data parallelism on the interface `Collectives`."""
