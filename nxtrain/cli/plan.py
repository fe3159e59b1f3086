"""Command `nxtrain plan`, which predicts memory, speed and cost of a run; it imports its implementation lazily."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from nxtrain.cli.options import AsJson, ConfigPath, Overrides, integer, number
from nxtrain.common.errors import ConfigError
from nxtrain.common.io.paths import local_path
from nxtrain.common.process.document import write_document
from nxtrain.config.bounds import MAX_RANKS

EPILOG = "Example: nxtrain plan configs/llama2_7b_trn1.toml --nodes 16 parallel.dp=0"


def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    instance: Annotated[
        str, typer.Option(metavar="NAME", help="Instance type, such as p5.48xlarge; by default cluster.instance.")
    ] = "",
    nodes: Annotated[int | None, integer(1, MAX_RANKS, help="Number of machines; by default cluster.nodes.")] = None,
    search: Annotated[bool, typer.Option("--search", help="List the layouts that fit, fastest first.")] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Compare the memory with one rank's training step on fake tensors.")
    ] = False,
    top: Annotated[int, integer(help="Rows of a search that are shown.")] = 15,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Published model in place of the configured one, such as gpt3-175b.")
    ] = "",
    method: Annotated[
        str,
        typer.Option(metavar="NAME", help="full, lora or qlora in place of finetune.method; all with --search."),
    ] = "",
    tokens: Annotated[float, number(0, 1e18, help="Tokens of the run; by default train.steps.")] = 0.0,
    dataset: Annotated[str, typer.Option(metavar="NAME", help="Data set with the tokens of the run.")] = "",
    device_hours: Annotated[
        float, number(0, 1e15, help="Hours of a GPU or NeuronCore, which give the days and tokens of the run.")
    ] = 0.0,
    hardware: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML file with machines of your own.", parser=local_path)
    ] = None,
    store_gb_s: Annotated[float, number(1e-3, 1e6, help="GB/s that a machine writes checkpoints with.")] = 1.0,
    mtbf_h: Annotated[
        float,
        number(0, 1e9, help="Hours between failures of the run; 0: by its chips."),
    ] = 0.0,
    price: Annotated[float | None, number(0, 1e9, help="USD per machine and hour.")] = None,
    as_json: AsJson = False,
) -> None:
    """Predict memory, speed and cost of a run on given machines, before a machine is booked.

    No model is built, and no run is started. A layout that does not fit is reported with its memory arithmetic; the
    exit code is then also 0, and `fits` in --json is false. The instance type may be abbreviated: trn1n, p5.
    """
    from nxtrain.plan.command import Question, find_layouts, length_of, predict
    from nxtrain.plan.presets import SHAPES
    from nxtrain.plan.show import show, show_search, show_trace

    question = Question(instance, nodes, hardware, model, method)
    length = length_of(tokens, dataset, device_hours)
    assumed = replace(length, store_bytes_s=store_gb_s * 1e9, mtbf_s=mtbf_h * 3600, price_usd_h=price)
    if trace and (search or model in SHAPES):
        what = f"nxtrain has no code for {model}"
        if search:
            what = "--search compares many layouts"
        raise ConfigError(f"--trace builds a rank of one layout, but {what}; use only one of the options")
    if search:
        layouts, note = find_layouts(config, overrides or [], question, assumed)
        if as_json:
            write_document(layouts.to_json())
        else:
            show_search(layouts, note, top)
        return
    prediction, note = predict(config, overrides or [], question, assumed)
    compared: dict[str, tuple[int, int]] = {}
    if trace:
        from nxtrain.tools.trace.fake_rank import trace_job

        compared = trace_job(prediction.job, prediction.stage).compared_with(prediction.bytes)
    if as_json:
        document = prediction.to_json()
        if trace:
            document["trace"] = {
                name: {"predicted": ours, "traced": theirs} for name, (ours, theirs) in compared.items()
            }
        write_document(document)
    else:
        show(prediction, note)
        show_trace(compared)
