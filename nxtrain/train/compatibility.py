"""Compatibility of a checkpoint with the run that resumes from it: model, types, data, tokenizer, seed and code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nxtrain.checkpoint.meta import Meta, fingerprint
from nxtrain.checkpoint.shards import MODEL
from nxtrain.common.errors import CheckpointError, ConfigError, Problem
from nxtrain.common.io.hub import model_named
from nxtrain.common.io.object_store import Location
from nxtrain.common.io.regular import read_bytes
from nxtrain.config.check import Resolved
from nxtrain.config.finetune_schema import FinetuneConfig
from nxtrain.config.model_folder import KEY
from nxtrain.config.schema import RunConfig
from nxtrain.config.show import dump
from nxtrain.parallel.precision import Precision, dtype_name

DRIFT_TOKENIZER = ("the tokenizer's fingerprint", "tokenizer_fingerprint")

DRIFT = {
    "seed": {"seed": "run.seed"},
    "batch": {
        "global_batch": "train.global_batch",
        "batch_ramp": "train.batch_ramp",
        "seq_ramp": "train.seq_ramp",
    },
    "tokenizer": {DRIFT_TOKENIZER[1]: DRIFT_TOKENIZER[0]},
    "data": {"data_fingerprint": "the data's fingerprint", "shuffle": "data.shuffle"},
    "code": {"code_fingerprint": "the code's fingerprint"},
}
"""Fields of `Meta` covered by each key of `checkpoint.allow_drift`, with the fields' names in messages."""

_UNUSED = {
    "cosine": ("warmup_ratio", "decay_ratio", "decay_shape", "pieces"),
    "linear": ("warmup_ratio", "decay_ratio", "decay_shape", "pieces"),
    "wsd": ("warmup_ratio", "decay_ratio", "pieces"),
    "constant": ("min_lr", "warmup_ratio", "decay_steps", "decay_ratio", "decay_shape", "pieces"),
    "inverse_sqrt": ("warmup_ratio", "decay_steps", "decay_ratio", "decay_shape", "pieces"),
    "pieces": ("min_lr", "warmup_steps", "warmup_ratio", "decay_steps", "decay_ratio", "decay_shape"),
}
"""Keys of `[optim]` that have no effect under each learning-rate schedule, or that other settings replace."""

UNRECORDED_VALUES: dict[str, object] = {
    "global_batch": 0,
    "tokenizer_fingerprint": "",
    "data_fingerprint": "",
    "shuffle": None,
    "code_fingerprint": "",
}
"""Values of `Meta` fields in a checkpoint that does not record them, such as a NeuronX Distributed checkpoint."""


@dataclass(frozen=True)
class RunInputs:
    """Identity of a run's data, tokenizer and frozen weights.

    Args:
        data: Fingerprint of the rows.
        tokenizer: Fingerprint of the tokenizer; empty for token ids of unknown origin.
        end_of_text: Token that the tokenizer puts at the end of a document; empty for token ids of unknown origin.
        trained: The tokenizer was trained on the data of the run, since no other was named or known.
        base: Fingerprint of the frozen weights below adapters; empty if there are none.
    """

    data: str
    tokenizer: str = ""
    end_of_text: str = ""
    trained: bool = False
    base: str = ""

    @staticmethod
    def of(
        data_fingerprint: str,
        tokenizer: Path | None,
        end_of_text: str = "",
        *,
        trained: bool = False,
        base: str = "",
    ) -> RunInputs:
        """Build the identity from the rows' fingerprint and the tokenizer's file."""
        identity = fingerprint([read_bytes(tokenizer)]) if tokenizer else ""
        return RunInputs(data_fingerprint, identity, end_of_text, trained, base)


def meta_at(step: int, plan: Resolved, inputs: RunInputs, before: Meta | None = None) -> Meta:
    """Metadata of this run's checkpoint at a step.

    Args:
        step: Number of finished updates.
        plan: Validated configuration.
        inputs: Identity of the run's data and tokenizer.
        before: Metadata at an earlier step; None for step 0.
    """
    config, precision = plan.config, Precision.of(plan.config.precision)
    samples = config.train.batch_sizes().before(step)
    tokens = samples * config.train.seq_len
    base = ""
    if inputs.base:  # a name valid in every working directory: an absolute path, or a commit of the Hub
        base = config.model.hf
        if model_named(base) is None:
            base = os.path.abspath(base)
    rewarm_after = None
    if before is not None:
        rewarm_after = before.rewarm_after
        sizes = config.train.batch_sizes(before.step, before.tokens)
        new_samples = sizes.before(step) - sizes.before(before.step)
        samples = before.samples + new_samples
        tokens = before.tokens + new_samples * config.train.seq_len
    return Meta(
        step=step,
        samples=samples,
        tokens=tokens,
        global_batch=config.train.global_batch,
        batch_ramp=tuple(stage.model_dump() for stage in config.train.batch_ramp),
        seq_ramp=tuple(stage.model_dump() for stage in config.train.seq_ramp),
        seed=config.run.seed,
        family=plan.family.name,
        config=plan.model.model_dump(mode="json"),
        adapter=_adapter(config.finetune),
        base=base,
        base_fingerprint=inputs.base,
        rewarm_after=rewarm_after,
        dtype=dtype_name(precision.params),
        state_dtype=dtype_name(precision.state),
        data_fingerprint=inputs.data,
        shuffle=config.data.shuffle,
        settings=_settings(config),
        tokenizer_fingerprint=inputs.tokenizer,
        end_of_text=inputs.end_of_text,
        config_fingerprint=fingerprint([dump(config).encode()]),
        code_fingerprint=code_fingerprint(plan),
    )


def refuse_other_commits(names: Sequence[str]) -> None:
    """Refuse to start if ranks read different models, since a repository of the Hub may change during the start.

    Args:
        names: Value of `model.hf` on each rank.

    Raises:
        ConfigError: The values differ.
    """
    different = list(dict.fromkeys(names))
    if len(different) > 1:
        reason = f"ranks read different models, {' and '.join(different)}"
        hint = f"name one commit or folder for all of them, such as model.hf={different[0]}"
        raise ConfigError([Problem(KEY, reason, hint=hint)])


def code_fingerprint(plan: Resolved) -> str:
    """Fingerprint of the training source: nxtrain's package and the model family's package."""
    return _fingerprint_of(__package__.partition(".")[0], type(plan.family).__module__.rpartition(".")[0])


def refuse_drift(checkpoint: Location, meta: Meta, fresh: Meta, plan: Resolved, *, trained: bool = False) -> None:
    """Refuse a checkpoint of another run; weights alone may start any run with the same model shape and tokenizer.

    Args:
        checkpoint: Folder of the checkpoint.
        meta: Metadata of the checkpoint.
        fresh: Metadata of this run at step 0.
        plan: Validated configuration.
        trained: The tokenizer of the run was trained on its data.

    Raises:
        CheckpointError: The checkpoint belongs to another run; the message names all differences.
    """
    firm = {
        "family": "family",
        "config": "config",
        "finetune": "adapter",
        "the fingerprint of model.hf": "base_fingerprint",
    }
    if meta.step:
        firm |= {"dtype": "dtype", "state_dtype": "state_dtype"}
    differences = [_difference(name, field, meta, fresh) for name, field in firm.items()]
    if meta.step and set(meta.kinds) != set(fresh.kinds):
        there = ", ".join(sorted({*meta.kinds} - {MODEL}))
        here = ", ".join(sorted({*fresh.kinds} - {MODEL}))
        keys = f"optim.name={plan.config.optim.name} with precision.update={plan.config.precision.update}"
        if "ema" in {*meta.kinds} ^ {*fresh.kinds}:
            keys += f" and optim.ema_decay={plan.config.optim.ema_decay}"
        differences.append(f"its optimizer kept {there}, and {keys} keeps {here} here")
    differences = [difference for difference in differences if difference]
    drift = {"tokenizer": _other_tokenizer(meta, fresh, trained=trained)}
    if meta.step:
        for key, fields in DRIFT.items():
            if key != "tokenizer":
                drifted = [_difference(name, field, meta, fresh) for field, name in fields.items()]
                drift[key] = "; ".join(difference for difference in drifted if difference)
    allowed = plan.config.checkpoint.allow_drift
    refused = {key: drift[key] for key in DRIFT if drift.get(key) and key not in allowed}
    if not differences and not refused:
        return
    way_out = ""
    if not differences:
        keys = ", ".join(f'"{key}"' for key in (*allowed, *refused))
        way_out = f"checkpoint.allow_drift=[{keys}] to resume anyway, "
    raise CheckpointError(
        f"{checkpoint} belongs to another run: {'; '.join([*differences, *refused.values()])}. Use {way_out}another "
        "run.dir, checkpoint.resume=never, or the configuration that the checkpoint was made with"
    )


def changes(meta: Meta, fresh: Meta) -> str:
    """Message about settings that differ from the checkpoint's and are allowed to differ; empty if none differs.

    Args:
        meta: Metadata of the checkpoint.
        fresh: Metadata of this run at step 0.
    """
    there, here = meta.settings, fresh.settings
    moved = [f"{key} {there[key]} there, {here[key]} here" for key in here if there.get(key, here[key]) != here[key]]
    return f"settings have changed since step {meta.step}: {'; '.join(moved)}" if moved else ""


def _other_tokenizer(meta: Meta, fresh: Meta, *, trained: bool) -> str:
    """Message about a difference between the checkpoint's tokenizer and the run's.

    The message is empty if both are equal. For weights alone, it is also empty if the run's token ids are of unknown
    origin.
    """
    if trained and not meta.tokenizer_fingerprint:
        return "it names no tokenizer, and the one here was trained on the data; set data.tokenizer to that of its ids"
    if not meta.step and not fresh.tokenizer_fingerprint:
        return ""
    name, field = DRIFT_TOKENIZER
    difference = _difference(name, field, meta, fresh)
    if difference and not meta.step:
        return f"{difference}, which is to be its own: leave data.tokenizer out"
    return difference


def _adapter(config: FinetuneConfig) -> dict[str, Any]:
    """Configuration keys that determine the shape of adapters; empty without adapters."""
    if not config.adapts:
        return {}
    keys = config.model_dump(include={"r", "alpha", "rslora"}) | {"targets": sorted(config.targets)}
    if config.method == "qlora":
        return {"method": config.method, **keys}
    return keys


def _settings(config: RunConfig) -> dict[str, Any]:
    optim = {f"optim.{key}": value for key, value in config.optim.model_dump(mode="json").items()}
    # The lengths of the schedule are compared in steps.
    steps = config.train.steps
    optim["optim.warmup_steps"] = config.optim.num_warmup_steps(steps)
    optim["optim.decay_steps"] = config.optim.decay_steps or steps
    if config.optim.schedule == "wsd":
        optim |= {"optim.decay_steps": config.optim.num_decay_steps(steps), "train.steps": steps}
    for key in _UNUSED[config.optim.schedule]:
        del optim[f"optim.{key}"]
    types = config.precision.model_dump(mode="json", exclude={"type"})
    precision = {f"precision.{key}": value for key, value in types.items()}
    tuning = config.finetune
    given: dict[str, Any] = {"finetune.dropout": tuning.dropout, "train.z_loss": config.train.z_loss}
    given |= {f"backend.{key}": getattr(config.backend, key) for key in ("attention", "deterministic")}
    given |= {f"model.{key}": getattr(config.model, key) for key in ("moe_dispatch", "moe_z_loss")}
    if config.model.moe_dispatch == "capacity":
        given["model.moe_capacity_factor"] = config.model.moe_capacity_factor
    given["data.doc_mask"] = config.data.doc_mask
    if tuning.compares:
        keys = ["objective", "beta", "label_smoothing", "orpo_lambda"]
        if tuning.objective == "kto":
            keys += ["desirable_weight", "undesirable_weight"]
        given |= {f"finetune.{key}": getattr(tuning, key) for key in keys}
    return {**optim, **precision, **given, "torch": torch.__version__}


def _difference(name: str, field: str, meta: Meta, fresh: Meta) -> str:
    there, here = getattr(meta, field), getattr(fresh, field)
    is_unrecorded = field in UNRECORDED_VALUES and there == UNRECORDED_VALUES[field]
    if there == here or is_unrecorded:
        return ""
    if isinstance(there, dict) and isinstance(here, dict) and there and here:
        return "; ".join(
            f"{name}.{key} is {_of(there, key)} there and {_of(here, key)} here"
            for key in {**there, **here}
            if _of(there, key) != _of(here, key)
        )
    return f"{name} is {there!r} there and {here!r} here"


def _of(table: Mapping[str, Any], key: str) -> str:
    return repr(table[key]) if key in table else "absent"


@cache
def _fingerprint_of(*packages: str) -> str:
    """Fingerprint of Python packages as first read by this process; later changes of their files do not count."""
    return fingerprint(_sources(packages))


def _sources(packages: Sequence[str]) -> Iterator[bytes]:
    for package in packages:
        (folder,) = sys.modules[package].__path__
        for file in sorted(Path(folder).rglob("*.py")):
            yield str(file.relative_to(folder)).encode()
            yield file.read_bytes()
