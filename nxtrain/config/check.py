"""Rules between configuration keys: degrees and batches, the model's shape, and supported combinations of features."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nxtrain.common.dimensions import Dimensions
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.family import ModelConfig, ModelFamily, find_family
from nxtrain.common.io.paths import copying, is_bucket
from nxtrain.common.mesh import Mesh, divisors
from nxtrain.common.text import listed
from nxtrain.config.batch_ramp import ramp_problems, seq_ramp_problems
from nxtrain.config.bounds import MAX_PERIOD, MAX_RANKS, integer, quoted, row_shares
from nxtrain.config.decode import decode
from nxtrain.config.device import float8, kernels_and_graphs, layers
from nxtrain.config.duration import duration
from nxtrain.config.experts import experts
from nxtrain.config.finetune import finetune
from nxtrain.config.idle import idle_keys
from nxtrain.config.load import Loaded, origin_of
from nxtrain.config.model_folder import read_shape, with_commit
from nxtrain.config.muon import muon_problems
from nxtrain.config.precision import precision
from nxtrain.config.schema import FULLY_SHARDED, ON_GPUS, ON_XLA, DataConfig, RunConfig
from nxtrain.config.stages import order, stages, transport
from nxtrain.config.tables import merge, toml_value

MOST_PROFILED = 100
"""Maximum number of steps in a profile, which records every operation of each step."""
_NO_NAME = re.compile("[/\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Characters that a folder name must not have: the slash, line ends, and terminal control characters."""
MOST_NAME_BYTES = 200
"""Maximum number of bytes of run.name. File systems allow 255, and file names add endings."""
_OF_UNITS = {
    "unit_params": "joins blocks whose parameters are gathered together",
    "prefetch": "gathers sharded parameters ahead of their use",
    "forward_prefetch": "gathers sharded parameters ahead of their use",
    "backward_prefetch": "gathers sharded parameters ahead of their use",
}
"""Keys of [parallel] about units of sharded parameters, and the effect of each key."""

DEFAULT_FAMILY = "llama"
"""Model family of a configuration that names none."""


@dataclass(frozen=True)
class Resolved:
    """A configuration that satisfies all rules, with its model family and shape.

    Args:
        config: All values. A `model.hf` on the Hub includes its commit.
        family: The model's family.
        model: The model's shape.
    """

    config: RunConfig
    family: ModelFamily
    model: ModelConfig

    @property
    def dimensions(self) -> Dimensions:
        """Dimensions of the model."""
        return self.family.dimensions(self.model)


def resolve_config(loaded: Loaded, world: int | None, backend: str = "", *, has_weights: bool = True) -> Resolved:
    """Check a configuration by all rules between its keys, and resolve its model.

    A command checks once, before torch is imported. Training checks again, once its backend is known.

    Args:
        loaded: The configuration, and the origin of each value.
        world: Number of ranks; None if unknown, then dp=0 counts as 1.
        backend: Backend that `backend.name=auto` has chosen; empty if not known yet.
        has_weights: Initial weights must be named if the method needs them. A plan works without them.

    Raises:
        ConfigError: The configuration has problems; the error lists all of them.
    """
    given = loaded.config
    chosen = given.backend.model_copy(update={"name": backend or given.backend.name})
    config = given.model_copy(update={"backend": chosen})
    problems = [*_model_choice(config), *layout(config, world, has_weights=has_weights)]
    problems += [*_name(config), *duration(config, loaded.origins), *_profile(config), *_tracker(config)]
    problems += [*_data(loaded), *_mirror(config), *_in_job(config), *idle_keys(config)]
    try:
        given = with_commit(given)
        config = config.model_copy(update={"model": given.model})
        model = resolve_model(config)
        parallel = config.parallel
        family = family_of(config)
        problems += family.check(model, tp=parallel.tp, seq_len=config.train.seq_len)
        problems += stages(parallel, model.num_hidden_layers)
        problems += experts(config, family.dimensions(model).mixture)
    except ConfigError as error:
        problems += error.problems
    parallel = config.parallel
    ranks = max(world or 1, parallel.ranks_per_replica * max(1, parallel.dp))
    world_size = world
    if world_size is None and parallel.dp:
        world_size = ranks
    if ranks > MAX_RANKS:
        reason = f"the run would have {ranks:,} ranks; a world has at most {MAX_RANKS:,}"
        problems.append(
            Problem("parallel.dp", reason, hint="lower parallel.tp, parallel.cp, parallel.pp, parallel.dp or --nproc")
        )
    elif world_size is not None:
        try:
            shard = max(1, parallel.shard_size)
            pp = parallel.pp
            dp = parallel.dp
            cp = parallel.cp
            ep = parallel.ep
            Mesh.build(world_size, 0, tp=parallel.tp, pp=pp, dp=dp, cp=cp, ep=ep, shard=shard)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError([replace(p, origin=p.origin or origin_of(loaded.origins, p.key)) for p in problems])
    return Resolved(given, family, model)


def layout(config: RunConfig, world: int | None = None, *, has_weights: bool = True) -> Iterator[Problem]:
    """Check degrees, modes and number types, without model and data; yield the problems. See `resolve_config`."""
    yield from _batch(config, world)
    yield from precision(config)
    yield from _sharding(config)
    yield from _offload(config)
    yield from layers(config)
    yield from kernels_and_graphs(config)
    yield from float8(config)
    yield from finetune(config, has_weights=has_weights)
    yield from muon_problems(config.optim, lr=config.optim.lr, method=config.finetune.method)
    yield from transport(config)
    yield from order(config)


def family_of(config: RunConfig) -> ModelFamily:
    """Model family of a configuration: `model.family`, else the family of `model.hf`, else llama.

    Raises:
        ConfigError: The family is not installed, or `model.hf` cannot be read.
    """
    model = config.model
    if model.family or not model.hf:
        return find_family(model.family or DEFAULT_FAMILY)
    named = str(read_shape(model.hf).get("model_type", DEFAULT_FAMILY))
    try:
        return find_family(named)
    except ConfigError as error:
        reason = f"{model.hf}/config.json is of model_type {named!r}, which no installed family computes"
        raise ConfigError([Problem("model.hf", reason, hint=error.problems[0].hint)]) from None


def resolve_model(config: RunConfig) -> ModelConfig:
    """Model configuration from `model.hf` or `model.preset`, with the changes of `[model.config]`.

    Raises:
        ConfigError: An unknown family or preset, a missing folder, or invalid values.
    """
    family = family_of(config)
    if config.model.hf:
        hf = read_shape(config.model.hf)
        reason = quantization(hf)
        if config.model.init == "hf" and reason:
            raise ConfigError([Problem("model.hf", f"{config.model.hf}: {reason}")])
        base = family.from_hf(hf)
    else:
        base = family.preset(config.model.preset or "tiny")
    shape, changes = base.model_dump(), config.model.config
    scaling = changes.get("rope_scaling")
    if isinstance(scaling, Mapping) and "rope_type" in scaling:
        shape["rope_scaling"] = None  # fields of another type would be left
    return decode(family.config_type, merge(shape, changes), prefix="model.config.")


def quantization(config: Mapping[str, Any]) -> str:
    """Reason to refuse the quantized weights of a `config.json`, with a solution; empty if not quantized."""
    section = config.get("quantization_config")
    if not section:
        return ""
    method = section.get("quant_method", "unknown") if isinstance(section, Mapping) else section
    return (
        f"config.json has a quantization_config (quant_method {method!r}), and its weights are quantized, but "
        "training needs unquantized weights; use the original model, or write one with transformers: "
        "model.dequantize(), then model.save_pretrained(DIR)"
    )


def _profile(config: RunConfig) -> Iterator[Problem]:
    steps = config.metrics.profile_steps
    if steps and not (len(steps) == 2 and 0 <= steps[1] - steps[0] < MOST_PROFILED):  # noqa: PLR2004 - first and last
        reason = f"{toml_value(steps)} is not the first and the last of at most {MOST_PROFILED} steps"
        yield Problem("metrics.profile_steps", reason, hint="use such as [10, 12]")


def _model_choice(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if model.preset and model.hf:
        reason = f"preset={model.preset!r} and hf={model.hf!r} both give the shape"
        yield Problem("model.preset", reason, hint='set one of them to ""')
    if model.init == "hf" and not model.hf:
        yield Problem(
            "model.init",
            "hf takes the weights of model.hf, which is not set",
            hint="set model.hf=FOLDER or ORGANIZATION/NAME",
        )


def _batch(config: RunConfig, world: int | None) -> Iterator[Problem]:
    parallel, train = config.parallel, config.train
    dp = parallel.dp or max(1, (world or 1) // parallel.ranks_per_replica)
    batch, micro = train.global_batch, train.micro_batch
    if batch % (micro * dp):
        low = batch // (micro * dp) * micro * dp
        works = " or ".join(str(n) for n in (low, low + micro * dp) if n)
        other = "" if batch % dp else f", or train.micro_batch among {listed(divisors(batch // dp))}"
        yield Problem(
            "train.global_batch",
            f"{batch} is not a multiple of micro_batch={micro} x dp={dp} = {micro * dp}",
            hint=f"use train.global_batch={works}{other}",
        )
    yield from ramp_problems(train.batch_ramp, micro * dp)
    masks, objective = config.data.doc_mask, config.finetune.objective
    yield from seq_ramp_problems(train.seq_ramp, train.seq_len, doc_mask=masks, objective=objective)
    divides = parallel.cp > 1 or parallel.ep > 1
    if config.metrics.noise_scale and (dp == 1 or divides or parallel.shard in FULLY_SHARDED):
        reason = f"compares gradients of several dp ranks, but dp={dp}, cp={parallel.cp}, shard={parallel.shard}"
        hint = "use dp of 2 or more, cp=1, ep=1, shard=none or zero1; or false"
        yield Problem("metrics.noise_scale", reason, hint=hint)
    yield from _sequence(config)


def _sequence(config: RunConfig) -> Iterator[Problem]:
    """Check the division of sequences over cp, and over tp with sequence parallelism; yield the problems."""
    parallel, train = config.parallel, config.train
    backend = config.backend
    parts = 1
    reasons, way_out = [], []
    if parallel.cp > 1:
        parts = parallel.cp
        reasons.append(f"cp={parallel.cp}")
        way_out.append("another parallel.cp")
        if parallel.cp_layout == "zigzag":
            parts *= 2
            reasons = [f"2 x cp={parts}, as cp_layout=zigzag asks,"]
            way_out = ["parallel.cp_layout=auto"]
    if parallel.sequence_parallel:
        parts = math.lcm(parts, parallel.cp * parallel.tp)
        if parallel.cp == 1:
            reasons.append(f"tp={parallel.tp}")
        else:
            reasons.append(f"cp x tp={parallel.cp * parallel.tp}, as sequence_parallel asks,")
        way_out.append("parallel.sequence_parallel=false")
    if train.seq_len % parts:
        low = train.seq_len // parts * parts
        works = " or ".join(str(n) for n in (low, low + parts) if n)
        reason = f"{' or '.join(reasons)} does not divide seq_len={train.seq_len}"
        if parallel.cp == 1:
            reason += ", as sequence_parallel asks"
        yield Problem("train.seq_len", reason, hint=f"use train.seq_len={works}, or {', or '.join(way_out)}")
    if parallel.cp == 1:
        return
    if parallel.cp_method == "ring" and backend.name in ON_XLA:
        reason = f"ring differs by rank, and backend.name={backend.name} records one graph for all ranks"
        yield Problem("parallel.cp_method", reason, hint="use auto or gather")
    if backend.layers == "nxd":
        reason = f"cp={parallel.cp} divides sequences in nxtrain's own layers, which backend.layers=nxd replaces"
        yield Problem("backend.layers", reason, hint="use auto or native")
    if config.compile.torch_compile and parallel.cp_method != "gather":
        reason = (
            f"cp_method={parallel.cp_method} may use a ring, whose transfers between ranks cannot be part of a "
            "graph, and torch.compile makes one graph of each block"
        )
        yield Problem("compile.torch_compile", reason, hint="use parallel.cp_method=gather, or false")


def _sharding(config: RunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.shard_size and parallel.shard != "hybrid":
        reason = f"{parallel.shard_size} is the number of ranks for shard=hybrid, but shard={parallel.shard}"
        yield Problem("parallel.shard_size", reason, hint="use parallel.shard_size=0, or parallel.shard=hybrid")
    without_units = instead = ""
    if parallel.shard not in FULLY_SHARDED:
        without_units = f"but shard={parallel.shard} does not shard parameters"
        instead = f"parallel.shard={', '.join(FULLY_SHARDED)}"
    elif config.compile.torch_compile == "step":
        without_units = "and with compile.torch_compile=step the compiler schedules the gathers"
        instead = "compile.torch_compile=true"
    if without_units:
        for key, does in _OF_UNITS.items():
            if getattr(parallel, key) != getattr(type(parallel)(), key):
                hint = f"leave it out, or use {instead}"
                yield Problem(f"parallel.{key}", f"{does}, {without_units}", hint=hint)
    elif parallel.backward_prefetch == "after" and not parallel.prefetch:
        reason = "after needs units that are gathered ahead, but prefetch=0"
        yield Problem("parallel.backward_prefetch", reason, hint="use parallel.prefetch=1 or more, or none")
    if parallel.shard in FULLY_SHARDED and config.backend.name in ON_XLA:
        reason = f"{parallel.shard} runs on the backends cpu, cuda and neuron-native, not on {config.backend.name}"
        yield Problem("parallel.shard", reason, hint="use parallel.shard=zero1, which every backend has")


def _offload(config: RunConfig) -> Iterator[Problem]:
    parallel, backend = config.parallel, config.backend.name
    key = "parallel.offload"
    if len(set(parallel.offload)) < len(parallel.offload):
        yield Problem(key, "names a kind twice", hint="name each once")
    if "params" in parallel.offload and parallel.shard not in FULLY_SHARDED:
        reason = f"keeps sharded parameters in host memory, but shard={parallel.shard} does not shard them"
        hint = f'use ["optimizer"] or false, or parallel.shard={", ".join(FULLY_SHARDED)}'
        yield Problem(key, reason, hint=hint)
    elif "params" in parallel.offload and config.compile.torch_compile == "step":
        reason = "loads parameters from host memory between graphs, and compile.torch_compile=step has one graph"
        yield Problem(key, reason, hint='use ["optimizer"] or false, or compile.torch_compile=true')
    elif "params" in parallel.offload and backend == "neuron-native":
        reason = "reduces tensors in host memory, and TorchNeuron's process group reduces device tensors only"
        yield Problem(key, reason, hint="use false")
    elif "params" in parallel.offload and parallel.dp == 1 and parallel.cp == 1:
        reason = "needs data parallel ranks that share the parameters, but dp=1"
        yield Problem(key, reason, hint="use false, or parallel.dp=0 and more ranks")
    elif parallel.offload and backend in (*ON_XLA, "neuron-native"):
        reason = f"copies between device and host in the middle of a step, which runs on cpu and cuda, not on {backend}"
        yield Problem(key, reason, hint="use false")
    if "activations" in parallel.offload and config.compile.torch_compile:
        reason = "moves activations that autograd saves, and compile.torch_compile chooses these itself"
        yield Problem(key, reason, hint="leave activations out, or use compile.torch_compile=false")


def _data(loaded: Loaded) -> Iterator[Problem]:
    data, train = loaded.config.data, loaded.config.train
    yield from _mixture(data)
    if data.source != "stdlib" and not data.path and not data.mixture:
        yield Problem("data.path", f"source={data.source} reads a path, and none is set", hint="set data.path=...")
    yield from _buckets(data)
    if data.packing == "best_fit" and data.source != "arrow":
        reason = f"best_fit packs whole documents, but source={data.source} is one stream of tokens"
        yield Problem("data.packing", reason, hint="use concat; or data.source=arrow, from nxtrain data prepare")
    if data.doc_mask and data.source == "tokens" and not data.tokenizer:
        reason = "documents are split at their end token, and source=tokens has no tokenizer that defines this token"
        yield Problem("data.doc_mask", reason, hint="set data.tokenizer to the tokenizer of the ids, or use false")
    if data.path and loaded.origins["data.source"] == "default":
        reason = f"path={data.path!r} is set, but no source: stdlib, the default, would not read it"
        yield Problem("data.source", reason, hint="set data.source=text, tokens or stdlib")
    held_out = data.validation_fraction
    if data.source == "tokens" and held_out:
        reason = f"holds out {held_out} of the documents, but source=tokens has rows without documents"
        yield Problem("data.validation_fraction", reason, hint="use data.validation_fraction=0")
    if data.validation_path and data.source != "arrow":
        reason = f"{data.validation_path} is a prepared corpus, which source={data.source} does not read"
        yield Problem("data.validation_path", reason, hint="use data.source=arrow, or data.validation_fraction")
    if data.validation_path and held_out:
        reason = f"{data.validation_path} is used for evaluation, so holding out {held_out} has no effect"
        yield Problem("data.validation_fraction", reason, hint="use 0, or leave data.validation_path out")
    if train.eval_every and (data.source == "tokens" or not (held_out or data.validation_path)):
        reason = f"eval_every={train.eval_every} evaluates on held-out documents, and none are held out"
        fraction = "" if data.source == "tokens" else ", or data.validation_fraction=0.05"
        yield Problem("train.eval_every", reason, hint=f"use train.eval_every=0{fraction}")


def _buckets(data: DataConfig) -> Iterator[Problem]:
    for key, name in (
        ("path", data.path),
        ("validation_path", data.validation_path),
        *(("mixture", n) for n in data.mixture),
    ):
        if not is_bucket(name):
            continue
        scheme, _, rest = name.partition("://")
        if not re.match("[^/]+/.", rest):
            yield Problem(f"data.{key}", f"{name} names no object", hint=f"write {scheme}://BUCKET/KEY")
        elif data.source not in ("arrow", "tokens"):
            reason = f"{name} is in a bucket, and source={data.source} reads files of this machine"
            fetch = copying(name, "SRC DST")
            hint = f"prepare it for data.source=arrow with nxtrain data prepare; or fetch it: {fetch}"
            yield Problem(f"data.{key}", reason, hint=hint)


def _mixture(data: DataConfig) -> Iterator[Problem]:
    if data.mixture and data.source not in ("arrow", "tokens"):
        reason = f"mixes rows of several corpora, but source={data.source} reads one corpus only"
        yield Problem("data.mixture", reason, hint="use data.source=arrow, from nxtrain data prepare; or tokens")
    if data.mixture and data.path:
        reason = f"path={data.path!r} has no effect with a mixture of {len(data.mixture)} corpora"
        yield Problem("data.path", reason, hint="leave it out, or name it in data.mixture")
    if len(set(data.mixture)) < len(data.mixture):
        yield Problem("data.mixture", "names a corpus twice", hint="name it once, with the sum of its weights")
    if data.weights and len(data.weights) != len(data.mixture):
        reason = f"has {len(data.weights)} numbers for the {len(data.mixture)} corpora of data.mixture"
        yield Problem("data.weights", reason, hint="give one for each, in the same order; or none, for equal shares")
    elif data.weights:
        period = sum(row_shares(data.weights))
        if period > MAX_PERIOD:
            reason = f"the corpora repeat after {integer(period)} rows, the sum of the smallest integers in this ratio"
            hint = f"round them to a sum of at most {MAX_PERIOD:,}; 4 digits always fit"
            yield Problem("data.weights", reason, hint=hint)


def _name(config: RunConfig) -> Iterator[Problem]:
    """Check run.name, which becomes the name of a folder and of a manifest file; yield the problems."""
    name = config.run.name
    shown = quoted(name)
    if not name.strip() or name in {".", ".."} or _NO_NAME.search(name):
        reason = f"{shown} is not a name of a folder: it is empty, . or .., or has a slash or a control character"
        yield Problem("run.name", reason, hint="give a plain name, and the place of the folder as run.dir=PATH/NAME")
    elif len(name.encode()) > MOST_NAME_BYTES:
        reason = f"{shown} has {len(name.encode()):,} bytes, and a name has at most {MOST_NAME_BYTES}"
        yield Problem("run.name", reason, hint="give a shorter name")


def _tracker(config: RunConfig) -> Iterator[Problem]:
    scheme = config.metrics.mlflow.partition("://")[0].partition("+")[0]
    if scheme in {"sqlite", "mysql", "postgresql", "mssql"} and find_spec("sqlalchemy") is None:
        reason = f"{config.metrics.mlflow} is a database, which the client of nxtrain[mlflow] cannot open"
        server = f"mlflow server --backend-store-uri {config.metrics.mlflow}, then metrics.mlflow=http://HOST:5000"
        yield Problem("metrics.mlflow", reason, hint=f"start a server in front: {server}; or pip install mlflow")


def _mirror(config: RunConfig) -> Iterator[Problem]:
    mirror = config.checkpoint.mirror
    scheme, _, rest = mirror.partition("://")
    if is_bucket(mirror) and not re.match("[^/]", rest):
        yield Problem("checkpoint.mirror", f"{mirror} names no bucket", hint=f"write {scheme}://BUCKET/PREFIX")
    elif mirror and Path(os.path.realpath(mirror)).is_relative_to(os.path.realpath(config.run.dir)):
        reason = f"{mirror} lies in run.dir={config.run.dir}, and a mirror must be outside of it"
        yield Problem("checkpoint.mirror", reason, hint="use a folder that nodes share, or s3://BUCKET/PREFIX")


def _in_job(config: RunConfig) -> Iterator[Problem]:
    """Check a run that replaces only its lost ranks (recovery.in_job); yield the problems."""
    recovery = config.recovery
    name = config.backend.name
    nodes = config.cluster.nodes
    if not recovery.in_job:
        return
    key, hint = "recovery.in_job", "use recovery.in_job=false, which restarts all ranks"
    if not recovery.max_restarts:
        yield Problem(key, "replaces lost ranks, and recovery.max_restarts=0 allows none", hint="use 1 or more")
    if name not in {"auto", "cpu", ON_GPUS}:
        yield Problem(key, f"replaces ranks of CPUs and GPUs, not of backend.name={name}", hint=hint)
    if nodes > 1:
        yield Problem(key, f"replaces ranks of one machine, and cluster.nodes={nodes}", hint=hint)
    if config.checkpoint.mirror:
        yield Problem(key, "may replace a rank during an upload to checkpoint.mirror", hint=hint)
