"""Tensor, sequence, context, expert, pipeline and data parallelism, built on the interface `Collectives`."""
