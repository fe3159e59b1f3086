"""Run folders as a run leaves them, written without a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nxtrain.common.process.clock import Instant
from nxtrain.common.run_folder import CONFIG_FILE, ENVIRONMENT_FILE, LOGS_DIR, METRICS_FILE, STARTS_FILE, SUMMARY_FILE
from nxtrain.config.tables import toml_key, toml_value
from nxtrain.metrics.goodput import RunStart, TimeSpent
from nxtrain.metrics.start_log import StartLog


def record(step: int, **more: Any) -> dict[str, Any]:
    """A record of a step whose numbers depend on the step only."""
    loss, norm = 3 + 5 / math.sqrt(step), 0.5 + 1 / step
    return {
        **{"step": step, "loss": loss, "grad_norm": norm, "grad_norm_mean": norm, "param_norm": 19 + step / 100},
        **{"lost_update_frac": 0.0, "lr": 1e-3, "tokens": 1024 * step, "tokens_per_s": 5e4, "step_time_s": 0.02},
        **{"mfu": None, "goodput": 0.9, "peak_memory_bytes": 3 << 30, "data_s": 0.001, "training_s": 0.019},
        **more,
    }


def start(resumed: int, last: int, *, began: float, outcome: str = "done", why: str = "") -> RunStart:
    """A start whose steps take a tenth of a second."""
    spent = TimeSpent(last, start_s=2.0, train_s=0.1 * (last - resumed), eval_s=0.5, stall_s=0.25)
    seen = Instant("boot", began + spent.total_s + 0.5, 1.7e9 + began + spent.total_s + 0.5)
    return RunStart(
        resumed, Instant("boot", began, 1.7e9 + began), seen, spent, outcome, ((last, spent.train_s),), why=why
    )


def restarted(steps: int, why: str = "rank 1 was killed") -> list[RunStart]:
    """Two starts, the first of which fails after half of the steps and loses ten."""
    half = steps // 2
    first = start(0, half, began=100.0, outcome="failed", why=why)
    return [first, start(half - 10, steps, began=first.seen.up + 5)]


def write_run(
    folder: Path,
    *,
    name: str = "run",
    steps: int = 60,
    records: Sequence[Mapping[str, Any]] | None = None,
    starts: Sequence[RunStart] | None = None,
    environment: Mapping[str, Any] | None = None,
    **config: Mapping[str, Any],
) -> Path:
    """Write a run folder; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    sections: dict[str, Mapping[str, Any]] = {
        "run": {"name": name, "seed": 0},
        "cluster": {"instance": "", "nodes": 1},
        "train": {"steps": steps, "global_batch": 16, "seq_len": 64},
    }
    lines = []
    for section in dict.fromkeys((*sections, *config)):
        lines.append(f"[{toml_key(section)}]")
        values = {**sections.get(section, {}), **config.get(section, {})}
        lines += [f"{toml_key(key)} = {toml_value(value)}" for key, value in values.items()]
    (folder / CONFIG_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    if records is None:
        records = [record(step, **_extras(step)) for step in range(1, steps + 1)]
    text = "".join(f"{json.dumps(each)}\n" for each in records)
    (folder / METRICS_FILE).write_text(text, encoding="utf-8")
    (folder / LOGS_DIR / STARTS_FILE).unlink(missing_ok=True)
    log = StartLog(folder / LOGS_DIR)
    for each in restarted(steps) if starts is None else starts:
        log.add("start", replace(each, outcome="", why="", spent=TimeSpent(each.resumed), seen=each.began, course=()))
        log.add("end", each)
    (folder / ENVIRONMENT_FILE).write_text(json.dumps(environment or {"torch": "2.9.0"}), encoding="utf-8")
    (folder / SUMMARY_FILE).write_text(json.dumps({"bits_per_byte": 1.5}), encoding="utf-8")
    return folder


def _extras(step: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if step % 20 == 0:
        found |= {"val_loss": 3.2 + 5 / math.sqrt(step), "evaluation_s": 0.2, "checkpoint_s": 0.1}
    if step == 31:
        found |= {"grad_norm": 4.0, "spikes": [[31, 1]], "alarm": "spike: grad_norm 4 is 8 times the median"}
    return found
