"""Model, stages, units and shards of a configuration or a run folder, for `nxtrain inspect`; computed without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nxtrain.checkpoint.directory import newest
from nxtrain.checkpoint.meta import read_meta
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.io.regular import read_text
from nxtrain.common.run_folder import CHECKPOINTS_DIR, CONFIG_FILE, ENVIRONMENT_FILE
from nxtrain.config.check import Resolved, resolve_config
from nxtrain.config.load import load
from nxtrain.plan.hardware import find_machine
from nxtrain.plan.job import Job
from nxtrain.plan.predict import layout_json
from nxtrain.plan.shapes import Stage, block_entries
from nxtrain.plan.tensors import Held, Rank, global_tensors
from nxtrain.plan.work import trained_params

_ANY_MACHINE = "trn1.32xlarge"
"""Machine of a configuration that names none; an inspection uses only the machine's number of devices."""


@dataclass(frozen=True)
class CheckpointFacts:
    """Newest complete checkpoint of a run folder.

    Args:
        path: Folder of the checkpoint.
        step: Number of finished updates.
        num_bytes: Bytes of all files.
        mesh: Parallel degrees of the run that wrote the checkpoint, by axis.
    """

    path: Path
    step: int
    num_bytes: int
    mesh: dict[str, int]

    @property
    def world(self) -> int:
        """Number of ranks that wrote the checkpoint."""
        return math.prod(self.mesh.values())

    def to_json(self) -> dict[str, Any]:
        """Path, step, bytes, number of ranks and mesh of the checkpoint, as a JSON object."""
        return {
            "path": str(self.path),
            "step": self.step,
            "bytes": self.num_bytes,
            "world": self.world,
            "mesh": self.mesh,
        }


@dataclass(frozen=True)
class Inspection:
    """Model, layout and newest checkpoint of a configuration or a run folder.

    Args:
        resolved: Validated configuration.
        job: The run, with `parallel.dp` resolved.
        checkpoint: Newest checkpoint; None for a configuration, or a run without checkpoints.
    """

    resolved: Resolved
    job: Job
    checkpoint: CheckpointFacts | None

    def chosen(self, number: int | None) -> list[Rank]:
        """Ranks to show: rank `number`, or if it is None the first rank of each pipeline stage.

        Raises:
            ConfigError: The run has no rank with this number.
        """
        if number is None:
            return [Rank.first_of(self.job, stage) for stage in range(self.job.config.parallel.pp)]
        if number >= self.job.world:
            reason = f"rank {number} does not exist: the run has {self.job.world:,} ranks"
            raise ConfigError([Problem("--rank", reason, hint=f"use 0 to {self.job.world - 1}")])
        return [Rank.of(self.job, number)]

    def model_json(self) -> dict[str, Any]:
        """Family, dimensions and parameter counts of the model, as a JSON object."""
        dimensions = self.job.dimensions
        whole = Stage(dimensions, (dimensions.num_layers,), first=True, last=True)
        total = dimensions.num_params
        choice = self.job.config.model
        return {
            "family": self.resolved.family.name,
            "preset": choice.preset,
            "hf": choice.hf,
            "dimensions": asdict(dimensions),
            "tied": dimensions.tied,
            "method": self.job.method,
            "params": {
                "total": total,
                "embedding": dimensions.vocab_size * dimensions.hidden_size,
                "block": block_entries(whole, 1, 1).local,
                "trained": trained_params(self.job),
            },
        }

    def to_json(self, rank: int | None) -> dict[str, Any]:
        """Model, layout, stages, tensors and checkpoint, as a JSON object.

        Args:
            rank: Rank whose tensors are listed; None for the first rank of every stage.
        """
        chosen = self.chosen(rank)
        stages = []
        tensors = []
        for of_stage in chosen:
            stages.append(
                {
                    "stage": of_stage.stage,
                    "rank": of_stage.mesh.rank,
                    "blocks": [[chunk.start, chunk.stop] for chunk in of_stage.blocks],
                    "others": [held.parameter.name for held in of_stage.others],
                    "units": [{"modules": list(unit.modules), "entries": unit.entries} for unit in of_stage.units],
                    "bytes": of_stage.bytes.to_json(),
                }
            )
            tensors += [_tensor_json(of_stage.stage, held) for held in of_stage.tensors()]
        return {
            "model": self.model_json(),
            "layout": {"world": self.job.world, "shard_size": self.job.shard_size, **layout_json(self.job)},
            "rank": rank,
            "stages": stages,
            "tensors": tensors,
            "checkpoint": None if self.checkpoint is None else self.checkpoint.to_json(),
        }


def inspect(path: Path, overrides: Sequence[str]) -> Inspection:
    """Inspect a configuration file or a run folder.

    Raises:
        ConfigError: The configuration or its layout is impossible, or the folder is not a run folder.
        CheckpointError: The metadata of the newest checkpoint is damaged.
    """
    is_run = path.is_dir()
    file = path / CONFIG_FILE if is_run else path
    if is_run and not file.is_file():
        raise ConfigError(f"{path} is not a run folder: it has no {CONFIG_FILE}; name a run.dir or a TOML file")
    loaded = load(file, overrides)
    checkpoint = _checkpoint(path) if is_run else None
    recorded = _recorded(path) if is_run else {}
    config = loaded.config
    if not config.parallel.dp and not any(override.startswith("parallel.") for override in overrides):
        parallel = config.parallel.model_copy(update={"dp": int(recorded.get("dp", 0))})
        config = config.model_copy(update={"parallel": parallel})
    parallel, cluster = config.parallel, config.cluster
    # Machines give the number of ranks if the data parallel degree is derived.
    if parallel.dp or not cluster.instance:
        world = parallel.ranks_per_replica * max(1, parallel.dp)
    else:
        world = find_machine(cluster.instance).devices * cluster.nodes
    resolved = resolve_config(replace(loaded, config=config), world, has_weights=False)
    dp = world // config.parallel.ranks_per_replica
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"dp": dp})})
    # The number of devices of the machine groups the ranks of hybrid sharding.
    ranks_per_node = int(recorded.get("ranks per node", 0))
    if ranks_per_node:
        machine = replace(find_machine(_ANY_MACHINE), devices=ranks_per_node)
    elif cluster.instance:
        machine = find_machine(cluster.instance)
    else:
        machine = replace(find_machine(_ANY_MACHINE), devices=max(1, world // cluster.nodes))
    job = Job(resolved.family.dimensions(resolved.model), machine, config.cluster.nodes, config)
    return Inspection(resolved, job, checkpoint)


def _recorded(run: Path) -> dict[str, Any]:
    """Integers that a run's newest start recorded, such as ranks and degrees; empty if the file is unreadable."""
    try:
        content = json.loads(read_text(run / ENVIRONMENT_FILE))
    except (OSError, RecursionError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {name: value for name, value in content.items() if isinstance(value, int)}


def _checkpoint(run: Path) -> CheckpointFacts | None:
    path = newest(run / CHECKPOINTS_DIR)
    if path is None:
        return None
    meta = read_meta(path)
    num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return CheckpointFacts(path, meta.step, num_bytes, dict(meta.mesh))


def _tensor_json(stage: int, held: Held) -> dict[str, Any]:
    wholes = global_tensors(held)
    parameter = held.parameter
    return {
        "name": parameter.name,
        "stage": stage,
        "shape": list(parameter.spec.shape),
        "local_shape": list(held.local_shape),
        "held_shape": list(held.shape),
        "state_shape": list(held.state_shape),
        "cut": held.cuts,
        "dtype": held.dtype,
        "bytes": held.num_bytes,
        "trained": parameter.is_trained,
        "checkpoint": [{"name": name, "shape": list(shape)} for name, shape in wholes.items()],
        "entries": [
            {
                "name": parameter.spec.global_name(parameter.name, box.segment),
                "offsets": list(box.offsets),
                "sizes": list(box.sizes),
            }
            for box in held.boxes
        ],
    }
