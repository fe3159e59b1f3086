"""Metrics of a run: throughput, goodput, files, trackers and progress."""
