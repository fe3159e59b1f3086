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
ATTEMPTS_FILE = "attempts.jsonl"
PROGRESS_FILE = "progress.json"
GOODPUT_FILE = "goodput.jsonl"
GOODPUT_LATEST_FILE = "goodput.json"
