"""Benchmarks of speed and memory; most also measure other implementations for comparison."""
