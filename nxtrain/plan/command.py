"""Predictions for a configuration file, on the machines that the file or the command line names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from nxtrain.common.dimensions import Dimensions
from nxtrain.common.errors import ConfigError, Problem
from nxtrain.common.family import family_names, find_family
from nxtrain.common.machines import Machine
from nxtrain.common.mesh import Mesh
from nxtrain.config.bounds import quoted
from nxtrain.config.check import DEFAULT_FAMILY, family_of, resolve_config, resolve_model
from nxtrain.config.finetune_schema import ADAPTER_KEYS, FinetuneConfig
from nxtrain.config.load import Loaded, load, origin_of
from nxtrain.config.schema import ON_XLA, RunConfig
from nxtrain.plan.adapters import METHODS
from nxtrain.plan.hardware import find_machine, read_machines
from nxtrain.plan.job import Job
from nxtrain.plan.length import with_length
from nxtrain.plan.predict import Assumptions, Prediction
from nxtrain.plan.presets import DATASETS, SHAPES
from nxtrain.plan.search import Rejected, SearchResult, impossible, search

ASSUMED = "trn1.32xlarge"
"""Instance type assumed for a run that names none."""

EVERY = "all"
"""Value of `--method` that compares all of `METHODS`."""


@dataclass(frozen=True)
class Question:
    """Machines and model for which a prediction is made, as given on the command line.

    Args:
        instance: Instance type; if empty, `cluster.instance` or else `ASSUMED`.
        nodes: Number of machines; None for `cluster.nodes`.
        hardware: TOML file with more machines; None for the built-in table only.
        model: Published model in place of the configured model; empty for the configured model.
        method: One of `METHODS` in place of `finetune.method`, or `EVERY` in a search; empty for the configured method.
    """

    instance: str = ""
    nodes: int | None = None
    hardware: Path | None = None
    model: str = ""
    method: str = ""


@dataclass(frozen=True)
class Setting:
    """Loaded configuration with its machines and the dimensions of its model.

    Args:
        loaded: The configuration and its provenance.
        machine: Kind of machine.
        nodes: Number of machines.
        dimensions: Dimensions of the model.
        note: Message about an assumed machine; may be empty.
    """

    loaded: Loaded
    machine: Machine
    nodes: int
    dimensions: Dimensions
    note: str = ""


def predict(path: Path, overrides: Sequence[str], question: Question, assumed: Assumptions) -> tuple[Prediction, str]:
    """Predict memory, time and cost for a configuration.

    Returns:
        The prediction, and a message about assumptions, which may be empty.

    Raises:
        ConfigError: The configuration, the instance or the layout is impossible.
    """
    if question.method == EVERY:
        raise ConfigError(f"--method {EVERY} compares methods in a search; add --search")
    setting = _setting(path, overrides, question)
    config, world = setting.loaded.config, setting.machine.devices * setting.nodes
    parallel = config.parallel
    named = parallel.ranks_per_replica * max(1, parallel.dp)
    if setting.note or (setting.nodes == 1 and parallel.dp and named < world):
        world = named  # a part of one machine
    if question.model in SHAPES:
        Mesh.build(world, 0, tp=parallel.tp, pp=parallel.pp, dp=parallel.dp, cp=parallel.cp, shard=1)
    else:
        resolve_config(replace(setting.loaded, config=config), world, has_weights=False)
    dp = world // parallel.ranks_per_replica
    config = config.model_copy(update={"parallel": parallel.model_copy(update={"dp": dp})})
    config, assumed, length = with_length(config, setting.dimensions.vocab_size, assumed)
    job = Job(setting.dimensions, setting.machine, setting.nodes, config)
    problems = list(impossible(job))
    if problems:
        origins = setting.loaded.origins
        raise ConfigError([replace(problem, origin=origin_of(origins, problem.key)) for problem in problems])
    return Prediction.of(job, assumed), "\n".join(filter(None, [setting.note, length]))


def find_layouts(
    path: Path, overrides: Sequence[str], question: Question, assumed: Assumptions
) -> tuple[SearchResult, str]:
    """Search for the fastest layouts of a configuration's run.

    The configured degrees, micro-batch and recomputation are ignored.

    Returns:
        The result of the search, and a message about assumptions, which may be empty.

    Raises:
        ConfigError: The configuration or the instance is impossible.
    """
    setting = _setting(path, overrides, question)
    config = setting.loaded.config
    if question.model not in SHAPES:
        family = family_of(config)
        problems = family.check(resolve_model(config), tp=1, seq_len=config.train.seq_len)
        if problems:
            raise ConfigError(problems)
    config, assumed, length = with_length(config, setting.dimensions.vocab_size, assumed)
    methods: Sequence[str] = (config.finetune.method,)
    if question.method == EVERY:
        methods = METHODS
    layouts: list[Prediction] = []
    rejected: list[Rejected] = []
    for method in methods:
        result = search(setting.dimensions, setting.machine, setting.nodes, _by(method, config), assumed)
        layouts += result.layouts
        rejected += result.rejected
    layouts.sort(key=lambda layout: layout.time.step_s)
    note = "\n".join(filter(None, [setting.note, length, assumed.unknown_length]))
    return SearchResult(tuple(layouts), tuple(rejected)), note


def length_of(tokens: float, dataset: str, device_hours: float) -> Assumptions:
    """Length of a planned run: tokens, a published data set, or device hours; `train.steps` if all are empty.

    Args:
        tokens: Number of tokens; 0 if not given.
        dataset: Name of a published data set; empty if not given.
        device_hours: Hours of devices; 0 if not given.

    Raises:
        ConfigError: More than one of the three is given, or the data set is unknown.
    """
    given = {"--tokens": tokens, "--dataset": dataset, "--device-hours": device_hours}
    names = [name for name, value in given.items() if value]
    if len(names) > 1:
        raise ConfigError(f"{' and '.join(names)} each give the length of the run; use one of them")
    if dataset and dataset not in DATASETS:
        raise _unknown("--dataset", dataset, list(DATASETS))
    if dataset:
        return Assumptions(tokens=DATASETS[dataset].tokens, data_bytes=DATASETS[dataset].bytes or 0.0)
    return Assumptions(tokens=tokens, device_hours=device_hours)


def _setting(path: Path, overrides: Sequence[str], question: Question) -> Setting:
    given = list(overrides)
    if question.model and question.model not in SHAPES:
        given += [f"model.family={_family_with(question.model)}", f"model.preset={question.model}"]
    loaded = load(path, given)
    config = loaded.config
    own = read_machines(question.hardware) if question.hardware else {}
    name = question.instance or config.cluster.instance or next(iter(own), "")
    if own and name not in own and not question.instance:
        reason = f"{quoted(name)} is none of the machines in --hardware {question.hardware}"
        raise ConfigError([Problem("cluster.instance", reason, hint=f"name a machine by --instance: {', '.join(own)}")])
    note, nodes = "", question.nodes or config.cluster.nodes
    machine = find_machine(name or ASSUMED, own, "--instance" if question.instance else "cluster.instance")
    if not name:
        parallel = config.parallel
        note = f"no instance is named, so {ASSUMED} is assumed; name one by --instance"
        nodes = max(nodes, -(-parallel.ranks_per_replica * max(1, parallel.dp) // machine.devices))
    if question.method and question.method not in (*METHODS, EVERY):
        raise _unknown("--method", question.method, [*METHODS, EVERY])
    if question.method and question.method != EVERY:
        config = _by(question.method, config)
    loaded = replace(loaded, config=_on(machine, config))
    if question.model in SHAPES:
        dimensions = SHAPES[question.model].dimensions
    else:
        dimensions = family_of(config).dimensions(resolve_model(config))
    return Setting(loaded, machine, nodes, dimensions, note)


def _family_with(preset: str) -> str:
    """Name of the installed model family that has a preset: Llama first, then the others by name.

    Raises:
        ConfigError: No installed family has the preset.
    """
    names = sorted(family_names(), key=lambda name: (name != DEFAULT_FAMILY, name))
    presets: dict[str, None] = {}
    for name in names:
        if preset in find_family(name).presets:
            return name
        presets |= dict.fromkeys(find_family(name).presets)
    raise _unknown("--model", preset, [*presets, *SHAPES])


def _on(machine: Machine, config: RunConfig) -> RunConfig:
    """Configuration with a backend that the machine supports; `cpu` is kept, to plan runs on a CPU.

    On Trainium `compile.torch_compile` is turned off, since PyTorch/XLA compiles anyway. So a recipe for GPUs can be
    planned on Trainium unchanged.
    """
    name = config.backend.name
    trainium = machine.kind.startswith("trn")
    is_for_trainium = name in ON_XLA or name == "neuron-native"
    if name in ("auto", "cpu") or trainium == is_for_trainium:
        return config
    changed: dict[str, object] = {}
    changed["backend"] = config.backend.model_copy(update={"name": "auto", "layers": "auto", "attention": "auto"})
    if trainium:
        changed["compile"] = config.compile.model_copy(update={"torch_compile": False})
    return config.model_copy(update=changed)


def _by(method: str, config: RunConfig) -> RunConfig:
    """Configuration with another fine-tuning method.

    The method `qlora` turns off `compile.torch_compile`, since matrices in NF4 are dequantized eagerly.
    """
    if method == config.finetune.method != "full":
        return config
    tuning: dict[str, object] = {"method": method}
    if method == "full":
        fields = FinetuneConfig.model_fields
        tuning |= {key: fields[key].default for key in ("adapter", *ADAPTER_KEYS)}
    changed: dict[str, object] = {"finetune": config.finetune.model_copy(update=tuning)}
    if method == "qlora":
        changed["compile"] = config.compile.model_copy(update={"torch_compile": False})
    return config.model_copy(update=changed)


def _unknown(option: str, name: str, known: list[str]) -> ConfigError:
    close = get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
    return ConfigError([Problem(option, f"unknown name {quoted(name)}", hint=hint)])
