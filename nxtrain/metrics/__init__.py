"""Metrics of a run: throughput, goodput, spikes, router loads, metric files, trackers and progress display."""
