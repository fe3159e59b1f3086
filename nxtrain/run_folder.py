"""Names in a run folder, `run.dir`."""

from __future__ import annotations

CONFIG_FILE = "config.toml"
"""The resolved configuration."""
SUMMARY_FILE = "summary.json"
METRICS_FILE = "metrics.jsonl"
LOCK_FILE = "lock"
"""Lock file, held while a run uses the folder."""
CHECKPOINTS_DIR = "checkpoints"
DATA_DIR = "data"
"""Token files that the run made of its text."""
TENSORBOARD_DIR = "tensorboard"
FAULTS_DIR = "faults"
"""Marks of injected faults that have happened."""

LOGS_DIR = "logs"
STARTS_FILE = "starts.jsonl"
"""Starts of the run, with a line for the begin and the end of each."""
START_FILE = "start.json"
"""The current start so far."""
