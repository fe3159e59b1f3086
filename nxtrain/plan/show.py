"""Tables of predictions on the terminal, printed by `nxtrain plan`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from nxtrain.backends.attention_choice import choose_torch
from nxtrain.common.text import duration
from nxtrain.config.schema import ON_GPUS
from nxtrain.plan.job import Job
from nxtrain.plan.predict import Prediction
from nxtrain.plan.search import SearchResult

GIB = 1 << 30
WIDTH = 118
"""Columns of a table if the output is not a terminal."""


def console() -> Console:
    """Console on standard output; a file or a pipe gets a fixed width."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, markup=False, highlight=False)


def show(prediction: Prediction, note: str) -> None:
    """Print the prediction for one layout."""
    screen = console()
    job = prediction.job
    data = prediction.to_json()
    parallel = job.config.parallel
    if note:
        screen.print(note)
    screen.print(
        f"{data['params'] / 1e9:,.2f}e9 parameters on {job.nodes} x {job.machine.name}: {parallel.degrees} "
        f"shard={parallel.shard}, {job.num_micro} micro-batches of "
        f"{job.config.train.micro_batch} x {job.config.train.seq_len} tokens"
    )
    memory = Table(f"device memory, stage {prediction.stage}", "GiB", box=box.SIMPLE_HEAD)
    memory.columns[1].justify = "right"
    for name, size in prediction.bytes.to_json().items():
        memory.add_row(name, f"{size / GIB:.3f}")
    memory.add_row("device", f"{job.machine.device_bytes / GIB:.3f}")
    for name, size in data["host_bytes"].items():
        if size:
            memory.add_row(f"host: {name}", f"{size / GIB:.3f}")
    screen.print(memory)
    times = Table("prediction", "value", "", box=box.SIMPLE_HEAD)
    for row in _rows(prediction):
        times.add_row(*row)
    screen.print(times)
    screen.print("fits" if data["fits"] else "\n".join(["does not fit:", *prediction.reasons]))
    if prediction.assumed.unknown_length:
        screen.print(prediction.assumed.unknown_length)


def _rows(prediction: Prediction) -> list[tuple[str, str, str]]:
    data, time = prediction.to_json(), prediction.time
    checkpoint = data["checkpoint"]
    run = data["run"]
    graphs = data["compile"]
    model = data["model_bytes"]
    kinds = ", ".join(f"{name} {size / 1e9:,.4g}" for name, size in model.items() if size and name != "total")
    nd = "flops_4nd" if "flops_4nd" in run else "flops_6nd"
    rows = [
        ("trained", f"{data['trained_share']:.2%}", f"{data['trained_params']:,} parameters, by {data['method']}"),
        *_experts(prediction.job),
        ("whole model", f"{model['total'] / 1e9:,.4g} GB", kinds),
        ("step", duration(time.step_s), f"compute {duration(time.compute_s)}, update {duration(time.update_s)}"),
        ("throughput", f"{prediction.tokens_per_s:,.0f} tokens/s", f"{data['sequences_per_s']:,.2f} sequences/s"),
        ("MFU", f"{time.mfu:.1%}", "operations of the model, causal attention, over the bf16 peak"),
        ("constants", "", time.basis),
        ("bubble", f"{time.bubble:.1%}", "share of the pipeline's time"),
    ]
    if prediction.job.backend == ON_GPUS:
        kernel = choose_torch(ON_GPUS, prediction.job.config.backend.attention, prediction.job.attention_shape)
        assert kernel is not None, "choose_torch always returns a kernel on a GPU"
        rows.append(("attention", kernel.kind, kernel.reason))
    elif prediction.job.attention_shape.limits or prediction.job.attention == "blocked":
        rows.append(("attention", prediction.job.attention, _attention_cost(prediction.job)))
    rows += [
        (f"{t.axis} traffic", f"{t.bytes / 1e9:,.2f} GB", f"{duration(t.seconds)} by {t.link}, {t.hidden:.0%} hidden")
        for t in time.traffic
    ]
    best = f"every {checkpoint['best_every']:,} steps ({duration(checkpoint['best_interval_s'])})"
    rows += [
        ("checkpoint", f"{prediction.checkpoint_bytes / 1e9:,.1f} GB", f"written in {duration(checkpoint['write_s'])}"),
        ("best interval", best, f"a failure every {duration(checkpoint['mtbf_s'])}"),
        ("goodput", f"{checkpoint['goodput']:.1%}", "at this interval"),
        ("Chinchilla", f"{run['chinchilla_tokens']:.3g} tokens", "20 per parameter"),
    ]
    if prediction.days is None:
        rows.append(("time, cost", "unknown", "as is the length of the run"))
    else:
        cost = prediction.cost_usd
        with_failures = "failures leave no time for a step and its checkpoint"
        if run["days_with_failures"] is not None:
            with_failures = f"{run['days_with_failures']:,.2f} days with failures"
        of = "of up to" if prediction.ramp else "of"
        rows += [
            ("steps", f"{run['steps']:,}", f"{of} {prediction.job.tokens_per_step:,} tokens"),
            *_ramps(prediction),
            ("learning rate", run["schedule"], run["learning_rates"]),
            ("tokens", f"{run['tokens']:.3g}", f"{nd[-3:].upper()}: {run[nd]:.3g} operations"),
            *_data_set(run),
            ("time", f"{prediction.days:,.2f} days", with_failures),
            ("device hours", f"{run['device_hours']:,.4g}", f"of {prediction.job.world:,} devices, without failures"),
            ("cost", "none" if cost is None else f"{cost:,.0f} USD", data["cost_note"]),
        ]
    if graphs["graphs"]:
        rows.append(("graphs", str(graphs["graphs"]), f"{graphs['host_bytes'] / GIB:,.0f} GiB of host to compile"))
    return rows


def _ramps(prediction: Prediction) -> list[tuple[str, str, str]]:
    """Table rows for the parts of a run with a batch or sequence length ramp; empty without a ramp."""
    rows = []
    for number, part in enumerate(prediction.ramp, 1):
        sequences = f"{part.job.config.train.global_batch:,} rows"
        if part.job.shorter_len:
            sequences += f" in sequences of {part.job.sequence_len:,} tokens"
        if part.job.computed_len > part.job.sequence_len:
            sequences += ", with the time of whole rows"
        speed = f"{duration(part.time.step_s)} per step, MFU {part.time.mfu:.1%}"
        rows.append((f"ramp, part {number}", f"{part.steps:,} steps", f"{sequences}: {speed}"))
    return rows


def _experts(job: Job) -> list[tuple[str, str, str]]:
    dimensions, mixture = job.dimensions, job.dimensions.mixture
    if mixture is None:
        return []
    share = f"{dimensions.num_active_params / dimensions.num_params:.1%}"
    chosen = f"{mixture.experts_per_token} of {mixture.num_experts} experts"
    return [("active", share, f"{dimensions.num_active_params:,} parameters, with {chosen} for each token")]


def _data_set(run: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    if not run["data_bytes"]:
        return []
    per_token = f"{run['data_bytes'] / run['tokens']:.2f} bytes per token"
    return [("data set", f"{run['data_bytes'] / 1e9:,.4g} GB", per_token)]


def _attention_cost(job: Job) -> str:
    """Description of the cost of attention with a window or document mask, or over a long row."""
    limits = "; ".join(job.attention_shape.limits)
    if job.attention == "blocked":
        cost = job.attention_shape.blocks_cost(job.backend)
        return f"{limits}. {cost}" if limits else cost
    return f"{limits}: a call for each document, planned as one for the row"


def show_search(result: SearchResult, note: str, top: int) -> None:
    """Print the layouts that a search found, and the reasons against rejected layouts."""
    screen = console()
    if note:
        screen.print(note)
    jobs = [*(layout.job for layout in result.layouts), *(bad.job for bad in result.rejected)]
    axes = ["tp", "cp", "pp", "dp"]
    if any(job.config.parallel.ep > 1 for job in jobs):
        axes.append("ep")
    columns = ("shard", "order", "micro", "remat", "GiB", "step", "tokens/s", "MFU")
    layouts = Table("method", *axes, *columns, box=box.SIMPLE_HEAD)
    for layout in result.layouts[:top]:
        parallel, train = layout.job.config.parallel, layout.job.config.train
        order = f"{parallel.virtual_pp} x 1f1b"
        if parallel.schedule == "zero_bubble":
            order = "zero bubble"
        layouts.add_row(
            layout.job.method,
            *(str(getattr(parallel, axis)) for axis in axes),
            parallel.shard,
            order,
            str(train.micro_batch),
            train.remat,
            f"{layout.bytes.total / GIB:.2f}",
            duration(layout.time.step_s),
            f"{layout.tokens_per_s:,.0f}",
            f"{layout.time.mfu:.1%}",
        )
    screen.print(layouts if result.layouts else "no layout fits")
    if result.reason:
        screen.print(result.reason)
    more = len(result.layouts) - top
    if more > 0:
        screen.print(f"and {more} slower layouts; --top {len(result.layouts)} shows all")
    if result.rejected:
        rejected = Table("method", *axes, "shard", "reason", box=box.SIMPLE_HEAD)
        for bad in result.rejected[:top]:
            parallel = bad.job.config.parallel
            degrees = [str(getattr(parallel, axis)) for axis in axes]
            rejected.add_row(bad.job.method, *degrees, parallel.shard, bad.reason)
        screen.print(rejected)
        if len(result.rejected) > top:
            screen.print(f"and {len(result.rejected) - top} more rejected; --json has all")


def show_trace(compared: Mapping[str, tuple[int, int]]) -> None:
    """Print predicted bytes next to the bytes of a traced step; print nothing without a trace."""
    if not compared:
        return
    table = Table("one rank on fake tensors", "predicted GiB", "traced GiB", "error", box=box.SIMPLE_HEAD)
    for name, (predicted, traced) in compared.items():
        error = ""
        if traced:
            error = f"{predicted / traced - 1:+.1%}"
        table.add_row(name, f"{predicted / GIB:.3f}", f"{traced / GIB:.3f}", error)
    console().print(table)
