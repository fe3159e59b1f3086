"""Benchmarks of speed and memory, with peers in the same run."""
