"""Training speed of nxtrain and of its peers, in turns, and of the matrix products that bound all of them.

Every candidate gets the same shapes, data, clipping and precision, and the same allocator settings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from nxtrain.common.errors import BackendError, ConfigError, Problem
from nxtrain.common.family import find_family
from nxtrain.common.process.document import write_document
from nxtrain.common.process.progress import Progress
from nxtrain.config.schema import ON_XLA
from nxtrain.tools.bench.turns import (
    BenchWorker,
    environment,
    machine,
    median_ratio,
    num_cores,
    started,
    take_all_turns,
)

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""A Llama of 56 million parameters."""

OURS, COMPILED = "nxtrain", "nxtrain_compiled"
PEER_DEFAULT = "transformers_default"
PEER = "transformers"
PEER_COMPILED = "transformers_compiled"
TITAN = "torchtitan"
PEAK = "gemm"


@dataclass(frozen=True)
class Candidate:
    """Implementation that is measured.

    Args:
        text: Description for people.
        package: Package that it needs, "" for none.
        compiled: The model goes through torch.compile.
    """

    text: str
    package: str = ""
    compiled: bool = False


CANDIDATES = {
    OURS: Candidate("nxtrain, eager"),
    COMPILED: Candidate("nxtrain, compile.torch_compile=true", compiled=True),
    PEER_DEFAULT: Candidate("transformers, eager, AdamW's defaults", "transformers"),
    PEER: Candidate("transformers, eager, fused AdamW", "transformers"),
    PEER_COMPILED: Candidate("transformers, torch.compile, fused AdamW", "transformers", compiled=True),
    TITAN: Candidate("torchtitan, AMP, compiled blocks, fused AdamW", "torchtitan", compiled=True),
}

MFU_FORMULA = "tokens/s * 6 * (matmul parameters + layers * heads * head size * seq_len) / peak; causal attention"
"""As Korthikanti et al. 2022 (arXiv:2205.05198), with the causal half of the attention."""


@dataclass(frozen=True)
class Workload:
    """Workload that every implementation computes.

    Args:
        steps: Updates per round and implementation.
        batch: Sequences per update.
        seq_len: Tokens per sequence.
        precision: Type of the weights and activations, `bf16` or `fp32`.
        shape: Model, under Hugging Face's names.
        preset: Name of the model, "" for `SHAPE`.
        threads: CPU threads of each process.
        backend: Name of the backend, as in backend.name.
        stock_allocator: Peers get glibc's default settings.
    """

    steps: int
    batch: int
    seq_len: int
    precision: str
    shape: Mapping[str, Any]
    preset: str = ""
    threads: int = 1
    backend: str = "cpu"
    stock_allocator: bool = False


def bench_train(*, work: Workload, candidates: Sequence[str], rounds: int, chart: Path | None, as_json: bool) -> None:
    """Measure and print.

    Args:
        work: Workload.
        candidates: Names from `CANDIDATES`; empty: all that are installed.
        rounds: Turns of each implementation, after one that warms up.
        chart: SVG file to draw the ratios into.
        as_json: Print JSON instead of tables.

    Raises:
        BackendError: The backend cannot run here, or a package of a chosen candidate is not installed.
        ConfigError: There is no such candidate, or the chart cannot be written.
    """
    from nxtrain.tools.bench.chart import check_chart, draw_ratios
    from nxtrain.tools.bench.train_tables import show

    check_chart(chart)
    names, left_out = choose_candidates(candidates, work.backend)
    check_backend(work.backend)
    measured, parts = measure(work, names, rounds)
    result = {
        "machine": machine(),
        **asdict(work),
        "rounds": rounds,
        "left_out": left_out,
        **summarize(measured, work),
        "breakdown": parts,
    }
    if chart is not None:
        draw_ratios(chart, result)
    if as_json:
        write_document(result)
    else:
        show(result)


def choose_candidates(wanted: Sequence[str], backend: str) -> tuple[list[str], dict[str, str]]:
    """Candidates to measure, and those that are left out, each with the reason.

    Raises:
        ConfigError: A wanted candidate does not exist.
        BackendError: A wanted candidate cannot run here.
    """
    unknown = [name for name in wanted if name not in CANDIDATES]
    if unknown:
        hint = f"known: {', '.join(CANDIDATES)}"
        raise ConfigError([Problem("--candidates", f"there is no candidate {name!r}", hint=hint) for name in unknown])
    left_out = {}
    for name in wanted or CANDIDATES:
        candidate = CANDIDATES[name]
        if candidate.package and find_spec(candidate.package) is None:
            left_out[name] = f"{candidate.package} is not installed"
        elif candidate.compiled and backend in ON_XLA:
            left_out[name] = f"the backend {backend} records whole steps, and torch.compile has no part in it"
    if wanted and left_out:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise BackendError(f"bench train cannot measure {reasons}; leave it out of --candidates")
    return [name for name in wanted or CANDIDATES if name not in left_out], left_out


def check_backend(backend: str) -> None:
    """Refuse a backend that cannot run on this machine.

    Raises:
        BackendError: There is no such backend, or it cannot run here; the message gives the reason.
    """
    from nxtrain.backends import support

    supported = support(backend)
    if not supported.ok:
        raise BackendError(f"--backend {backend} cannot run here: {supported.reason}")


def workload(  # 8 arguments: one for each option
    *, steps: int, batch: int, seq_len: int, precision: str, preset: str, threads: int, backend: str, stock: bool
) -> Workload:
    """Workload of the command's options; 0 threads: all cores.

    Raises:
        ConfigError: No such preset.
    """
    shape = shape_of(preset, seq_len)
    return Workload(steps, batch, seq_len, precision, shape, preset, threads or num_cores(), backend, stock)


def shape_of(preset: str, seq_len: int) -> dict[str, Any]:
    """The model under Hugging Face's names.

    Raises:
        ConfigError: No such preset.
    """
    if not preset:
        return {**SHAPE, "max_position_embeddings": seq_len}
    return find_family("llama").preset(preset).model_dump(mode="json")


def measure(work: Workload, names: Sequence[str], rounds: int) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Turns of each candidate and of the peak, the first of which warms up; and the parts of nxtrain's own steps."""
    env, job = environment(work.threads, work.backend), json.dumps(asdict(work))
    all_names = (*names, PEAK)
    with started({name: BenchWorker("nxtrain.tools.bench.worker", name, job, env) for name in all_names}) as workers:
        measured = take_all_turns(workers, rounds)
        parts = {}
        with Progress("parts of a step"):
            for name in names:
                if name in (OURS, COMPILED) and work.backend not in ON_XLA:
                    parts[name] = workers[name].turn("breakdown")
    for name, breakdown in parts.items():
        breakdown["unprofiled_step_s"] = median(_steps_s(measured[name][1:]))
    return measured, parts


def _steps_s(turns: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of each step of some turns."""
    return list(chain.from_iterable(turn["step_s"] for turn in turns))


def summarize(measured: Mapping[str, Sequence[Mapping[str, Any]]], work: Workload) -> dict[str, Any]:
    """Medians over rounds, ratios inside each round, and MFU by the peak of the same round.

    Args:
        measured: Turns of each candidate: seconds by clock; of the peak, FLOPs per second by clock. The first turn
            warms up, and has the compilation.
        work: Workload.
    """
    from nxtrain.tools.bench.clocks import ratio_clock

    family = find_family("llama")
    flops = family.dimensions(family.config_type.model_validate(work.shape)).flops_per_token(work.seq_len)
    tokens = work.steps * work.batch * work.seq_len
    names = [name for name in measured if name != PEAK]
    peaks = measured[PEAK][1:]
    common_clocks = set.intersection(*(set(turn) for turn in peaks))
    clocks = [clock for clock in ("device", "cpu", "wall") if clock in common_clocks]
    device = measured[names[0]][0]["device"]
    clock = ratio_clock(device, work.threads, set(clocks))
    peak_rounds = [turn[clock] for turn in peaks]
    rates: dict[str, dict[str, list[float]]] = {}
    rows = []
    for name in names:
        turns = measured[name]
        rates[name] = {}
        for one in clocks:
            rates[name][one] = [tokens / turn[one] for turn in turns[1:]]
        rows.append(_row(name, turns, rates[name], peak_rounds, clock, flops))
    speeds = {name: rates[name][clock] for name in names}
    ours = [name for name in names if name in (OURS, COMPILED)]
    best = max(ours, key=lambda name: median(speeds[name]), default="")
    ratios_of = {}
    for name in ours:
        ratios_of[name] = {peer: _ratio(speeds[name], speeds[peer]) for peer in names if peer != name}
    ratios = {peer: ratio["value"] for peer, ratio in ratios_of.get(best, {}).items() if peer not in ours}
    peak_row = {"name": PEAK, "value": median(peak_rounds), "unit": "FLOP/s", "rounds": peak_rounds}
    return {
        "clock": clock,
        "device": device,
        "rows": [*rows, peak_row],
        "ours": best,
        "ratios": ratios,
        "ratios_of": ratios_of,
        "ratio": ratios.get(PEER),
        "flops_per_token": flops,
        "mfu_formula": MFU_FORMULA,
        "peak_flops": median(peak_rounds),
        **{row["name"]: {"tokens_per_s": row["value"], "mfu": row["mfu"]} for row in rows},
    }


def _row(
    name: str,
    turns: Sequence[Mapping[str, Any]],
    rates: Mapping[str, Sequence[float]],
    peaks: Sequence[float],
    clock: str,
    flops: int,
) -> dict[str, Any]:
    first, *rest = turns
    mfu_of_maker = None
    if first["maker_flops"]:
        mfu_of_maker = median(rates[clock]) * flops / first["maker_flops"]
    row = {
        "name": name,
        "text": CANDIDATES[name].text,
        "value": median(rates[clock]),
        "unit": "tokens/s",
        "rounds": rates[clock],
        "by_clock": {one: {"value": median(rounds), "rounds": rounds} for one, rounds in rates.items()},
        "mfu": median(rate * flops / peak for rate, peak in zip(rates[clock], peaks, strict=True)),
        "mfu_of_maker": mfu_of_maker,
        "first_step_s": first["step_s"][0],
        "loss": rest[-1]["loss"],
        "notes": list(first["notes"]),
    }
    if CANDIDATES[name].compiled:
        row["compile_s"] = max(0.0, first["step_s"][0] - median(_steps_s(rest)))
    return row


def _ratio(ours: Sequence[float], peer: Sequence[float]) -> dict[str, Any]:
    return {"value": median_ratio(ours, peer), "rounds": [a / b for a, b in zip(ours, peer, strict=True)]}
