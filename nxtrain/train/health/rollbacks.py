"""Rollbacks of a diverging run to a checkpoint from before the divergence, skipping the batches since then.

The log of rollbacks is the only state. A line `rolled_back` asks the next start to roll back. A line `rewound` has the
step to which a start went back, and the number of batches that it skips after this step. Every later start reads both,
so that each step has the same batch in every start.

Source: Chowdhery et al. 2022, PaLM (arXiv:2204.02311), section 5.1, restarts 100 steps before a spike and skips the
batches around the spike.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from nxtrain.checkpoint import directory
from nxtrain.common.batch_sizes import BatchSizes
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.errors import CheckpointError, DivergedError, RestartError
from nxtrain.common.io.jsonl import JsonlLog
from nxtrain.common.run_folder import CHECKPOINTS_DIR, LOGS_DIR
from nxtrain.data.loader import Skips, rows_left_out
from nxtrain.metrics.stability import SMOOTHED, SUSTAINED

ROLLBACKS = "rollbacks.jsonl"

MOST = 3
"""Largest number of rollbacks to one step; if the run diverges again, its batches are not the cause."""

BEFORE = SUSTAINED + SMOOTHED
"""Number of steps before an alarm whose checkpoints are not used, since their norms already grow."""


class Rollbacks:
    """Rollbacks of a run, as recorded in its log. Every rank creates one, and makes the same calls."""

    def __init__(self, run_dir: Path, ranks: Ranks) -> None:
        self._log, self._checkpoints = JsonlLog(run_dir / LOGS_DIR / ROLLBACKS), run_dir / CHECKPOINTS_DIR
        self._ranks = ranks
        # Read by one rank: where each node has its own disk, only the leader's disk holds the file.
        lines = ranks.on_leader(self._log.read, f"cannot read {self._log.file}")
        self._lines: list[dict[str, Any]] = [line for line in lines if _is_whole(line)]
        self._began = 0

    @property
    def pending(self) -> int | None:
        """Last step whose checkpoint may be used by a rollback that is still to be done; None for no such rollback."""
        if not self._lines or self._lines[-1]["verdict"] != "rolled_back":
            return None
        return int(self._lines[-1]["keeps"])

    @property
    def skips(self) -> Skips:
        """Batches that are left out: the number of batches after each step."""
        skips: dict[int, int] = {}
        for line in self._lines:
            if line["verdict"] == "rewound":
                skips = {step: number for step, number in skips.items() if step < line["resumed"]}
                skips[line["resumed"]] = line["batches"]
        return tuple(skips.items())

    def resume(self, step: int, sizes: BatchSizes) -> None:
        """Record the step from which a start continues; if a rollback is pending, skip the batches seen since then.

        Args:
            step: Number of finished updates at the start.
            sizes: Global batch of each update. Skipped batches have the size of the next update's batch.
        """
        self._began = step
        if self.pending is None:
            return
        last = self._lines[-1]["step"]
        rows = rows_left_out(self.skips, step, last - 1, sizes)
        if last > step:
            rows += sizes.before(last) - sizes.before(step)
        batches = -(-rows // sizes.at(step))
        self._add({"verdict": "rewound", "step": last, "resumed": step, "batches": batches})

    def roll_back(self, at: int, step: int, alarm: str) -> NoReturn:
        """End this start after an alarm, and request a rollback from the next start.

        Args:
            at: Step of the alarm.
            step: Last finished step.
            alarm: Text of the alarm.

        Raises:
            DivergedError: No rollback is possible or useful.
            RestartError: The rollback is requested.
        """
        keeps = max(0, at - BEFORE)
        said = f"step {at}: {alarm}; the run is diverging, recovery.on_divergence=rollback"
        again = sum(line["verdict"] == "rewound" and line["resumed"] == self._began for line in self._lines)
        if again >= MOST:
            raise DivergedError(
                f"{said}, but it was rolled back to step {self._began} {again} times already, and skipped other "
                "batches each time. Batches are not the cause: use a lower optim.lr, a longer optim.warmup_steps or a "
                "smaller optim.clip"
            )
        steps = self._ranks.on_leader(
            lambda: [directory.step_of(path) for path in directory.list_checkpoints(self._checkpoints)],
            f"cannot look for checkpoints in {self._checkpoints}",
        )
        if steps and min(steps) > keeps:
            raise DivergedError(
                f"{said}, but no checkpoint from step {keeps} or before is left. Those that are left: "
                f"{', '.join(map(str, steps))}. "
                "Raise checkpoint.keep or checkpoint.every to keep an older checkpoint, or lower optim.lr"
            )
        self._add({"verdict": "rolled_back", "step": step, "keeps": keeps, "alarm": alarm})
        raise RestartError(
            f"{said}: with recovery.max_restarts, the run restarts from a checkpoint of step {keeps} or before, and "
            f"skips the batches from there to step {step}"
        )

    def _add(self, line: Mapping[str, Any]) -> None:
        """Write a line to the log on disk before any rank continues."""
        self._lines.append(dict(line))
        problem = self._ranks.on_leader(lambda: self._log.add(line), f"cannot write {self._log.file}")
        if problem:
            raise CheckpointError(
                f"{self._log.file} cannot be written: {problem}. A rollback needs this file: make room for it, and "
                "start the run again; it resumes from its newest checkpoint"
            )


def _is_whole(line: Mapping[str, Any]) -> bool:
    keys = ["step", "keeps"] if line.get("verdict") == "rolled_back" else ["step", "resumed", "batches"]
    return all(isinstance(line.get(key), int) and line[key] >= 0 for key in keys)
