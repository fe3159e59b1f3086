"""Metrics of a run: throughput, goodput, the metrics file, TensorBoard events and the progress bar."""
