"""`nxtrain bench train`: training speed of nxtrain, transformers and torchtitan, and peak speed of matrix products.

All implementations get the same shapes, data, clipping, precision and allocator settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from nxtrain.common.errors import BackendError
from nxtrain.common.family import ModelConfig, find_family
from nxtrain.common.process.progress import Progress
from nxtrain.config.schema import ON_XLA
from nxtrain.launch.threads import num_cores
from nxtrain.tools.bench import harness
from nxtrain.tools.bench.breakdown import KINDS
from nxtrain.tools.bench.chart import check_chart, write_chart
from nxtrain.tools.bench.harness import BenchWorker, take_turns

SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""Shape of a Llama model with 56 million parameters."""

OURS, COMPILED = "nxtrain", "nxtrain_compiled"
PEER_DEFAULT = "transformers_default"
PEER = "transformers"
PEER_COMPILED = "transformers_compiled"
TITAN = "torchtitan"
PEAK = "gemm"

ON_HOST = ("cpu", "xla")
"""Backends that compute in host memory, where all candidates fit at the same time."""

BREAKDOWN = "breakdown"  # request for the breakdown of a step by kinds of operations

CLOCKS = {"device": "the device's clock", "cpu": "CPU time", "wall": "wall time"}


@dataclass(frozen=True)
class Candidate:
    """Training implementation that the benchmark can measure."""

    text: str
    package: str = ""  # package that the implementation needs; empty: none
    compiled: bool = False  # the model goes through torch.compile


CANDIDATES = {
    OURS: Candidate("nxtrain, eager"),
    COMPILED: Candidate("nxtrain, compile.torch_compile=true", compiled=True),
    PEER_DEFAULT: Candidate("transformers, eager, AdamW's defaults", "transformers"),
    PEER: Candidate("transformers, eager, fused AdamW", "transformers"),
    PEER_COMPILED: Candidate("transformers, torch.compile, fused AdamW", "transformers", compiled=True),
    TITAN: Candidate("torchtitan, AMP, compiled blocks, fused AdamW", "torchtitan", compiled=True),
}

MFU_FORMULA = "tokens/s * 6 * (matmul parameters + layers * heads * head size * seq_len) / peak; causal attention"
"""Formula of the model FLOPs utilization (MFU), printed below the results.

It follows Korthikanti et al. 2022 (arXiv:2205.05198), with the causal half of the attention.
"""


@dataclass(frozen=True)
class Workload:
    """Training workload that every candidate runs."""

    steps: int  # updates per round and implementation
    batch: int  # sequences per update
    seq_len: int
    precision: str  # type of the weights and activations, `bf16` or `fp32`
    shape: Mapping[str, Any]  # model, under Hugging Face's names
    preset: str = ""  # name of the model, "" for `SHAPE`
    threads: int = 1
    backend: str = "cpu"
    stock_allocator: bool = False  # peers get glibc's default settings
    family: str = "llama"

    @property
    def model(self) -> ModelConfig:
        """Model configuration of the workload's family, from `shape`."""
        return find_family(self.family).config_type.model_validate(self.shape)


def bench_train(*, work: Workload, candidates: Sequence[str], rounds: int, chart: Path | None, as_json: bool) -> None:
    """Measure the training speed of each candidate and print the results.

    Args:
        candidates: Names from `CANDIDATES`; empty: all that are installed.
        chart: SVG file for a bar chart of the speed ratios; None: no chart.
    """
    check_chart(chart)
    has_experts = find_family(work.family).dimensions(work.model).mixture is not None
    names, left_out = choose_candidates(candidates, work.backend, work.family, has_experts=has_experts)
    devices = check_backend(work.backend)
    measured, parts = measure(work, names, rounds)
    result = {
        "machine": harness.machine(),
        "devices": devices,
        **asdict(work),
        "rounds": rounds,
        "left_out": left_out,
        **summarize(measured, work),
        "breakdown": parts,
    }
    if chart is not None:
        bars = {}
        for ours, ratios in result["ratios_of"].items():
            for peer, ratio in ratios.items():
                if peer not in result["ratios_of"]:
                    bars[f"{ours} / {peer}"] = ratio["rounds"]
        title = f"nxtrain bench train: speed over peers ({result['clock']} time, 1.0 = equal)"
        write_chart(chart, bars, title, result["machine"], f"; {work.precision}, {work.threads} threads")
    harness.present(result, lambda: _shown(result), as_json=as_json)


def choose_candidates(
    wanted: Sequence[str], backend: str, family: str = "llama", *, has_experts: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Choose the candidates to measure.

    Returns:
        Names of the candidates; the reason for each candidate that cannot be measured.

    Raises:
        BackendError: A candidate in `wanted` cannot be measured.
    """
    harness.refuse_unknown("--candidates", "candidate", wanted, CANDIDATES)
    left_out = {}
    for name in wanted or CANDIDATES:
        candidate = CANDIDATES[name]
        if candidate.package and find_spec(candidate.package) is None:
            left_out[name] = f"{candidate.package} is not installed"
        elif candidate.compiled and backend in ON_XLA:
            left_out[name] = f"the backend {backend} compiles whole steps itself, without torch.compile"
        elif candidate.package == "torchtitan" and family != "llama":
            left_out[name] = f"its model is a Llama, not a model of the family {family}"
        elif name == COMPILED and has_experts:
            left_out[name] = "blocks with experts are not compiled"
    if wanted and left_out:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise BackendError(f"bench train cannot measure {reasons}; leave it out of --candidates")
    return [name for name in wanted or CANDIDATES if name not in left_out], left_out


def check_backend(backend: str, *, eager: bool = False) -> str:
    """Check that a backend can run the benchmark on this machine.

    Args:
        eager: The backend must compute operations one by one.

    Returns:
        Number and name of the devices; empty for a CPU.

    Raises:
        BackendError: The backend does not exist, cannot run here, or is not eager although `eager` is set.
    """
    from nxtrain.backends import support

    if eager and backend in ON_XLA:
        raise BackendError(
            f"--backend {backend} compiles whole graphs, so single operations cannot be timed; use another backend"
        )
    supported = support(backend)
    if not supported.ok:
        raise BackendError(f"--backend {backend} cannot run here: {supported.reason}")
    return "" if backend in ON_HOST else supported.reason


def workload(  # 8 arguments: one for each option
    *,
    steps: int,
    batch: int,
    seq_len: int,
    precision: str,
    preset: str,
    threads: int = 1,
    backend: str = "cpu",
    stock: bool = False,
) -> Workload:
    """Build the workload from the command's options.

    Args:
        preset: Name of a model preset, optionally `family/name`; empty: the model of `SHAPE`.
        threads: Number of CPU threads; 0: all cores.
    """
    shape: dict[str, Any] = {**SHAPE, "max_position_embeddings": seq_len}
    family, _, name = preset.rpartition("/")
    family = family or "llama"
    if preset:
        shape = find_family(family).preset(name).model_dump(mode="json")
    return Workload(steps, batch, seq_len, precision, shape, preset, threads or num_cores(), backend, stock, family)


def measure(
    work: Workload, names: Sequence[str], rounds: int
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, dict[str, Any]]]:
    """Measure all candidates and the peak of matrix products, and break down one step of nxtrain.

    On the host, the processes of all candidates run alternately. On a device, the process of each candidate ends before
    the next starts.

    Returns:
        Measurements of every round by name; breakdown of one step by nxtrain's candidate names.
    """
    env = harness.environment(work.threads, work.backend)
    together = [[*names, PEAK]]
    if work.backend not in ON_HOST:  # a device's memory cannot hold the states of all candidates
        together = [[name] for name in together[0]]
    measured: dict[str, list[dict[str, Any]]] = {}
    parts = {}
    for group in together:
        with ExitStack() as stack:
            workers = {}
            for name in group:
                workers[name] = stack.enter_context(BenchWorker("training", name, asdict(work), env))
            measured |= take_turns({name: worker.turn for name, worker in workers.items()}, rounds)
            with Progress("parts of a step"):
                for name in group:
                    if name in (OURS, COMPILED) and work.backend not in ON_XLA:
                        parts[name] = workers[name].turn(BREAKDOWN)
                        parts[name]["unprofiled_step_s"] = median(turn["step_s"] for turn in measured[name])
    return measured, parts


def summarize(measured: Mapping[str, Sequence[Mapping[str, Any]]], work: Workload) -> dict[str, Any]:
    """Median training speeds over rounds, speed ratios inside each round, and MFU by the same round's peak."""
    flops = find_family(work.family).dimensions(work.model).flops_per_token(work.seq_len)
    names = [name for name in measured if name != PEAK]
    device = measured[names[0]][0]["device_type"]
    clocks = [*CLOCKS]
    for turn in measured[PEAK]:
        clocks = [clock for clock in clocks if clock in turn]
    clock = ratio_clock(device, work.threads, clocks)
    peaks = [turn[clock] for turn in measured[PEAK]]
    rows = {name: _row(name, measured[name], work, clocks, clock) for name in names}
    for row in rows.values():
        row["mfu"] = median(rate * flops / peak for rate, peak in zip(row["rounds"], peaks, strict=True))
        row["mfu_of_maker"] = None
        if row["maker_flops"]:
            row["mfu_of_maker"] = row["value"] * flops / row["maker_flops"]
    ours = [name for name in names if name in (OURS, COMPILED)]
    best = max(ours, key=lambda name: rows[name]["value"], default="")
    ratios_of: dict[str, dict[str, Any]] = {}
    for name in ours:
        ratios_of[name] = {}
        for peer in names:
            if peer != name:
                speeds = zip(rows[name]["rounds"], rows[peer]["rounds"], strict=True)
                ratios = [a / b for a, b in speeds]
                ratios_of[name][peer] = {"value": median(ratios), "rounds": ratios}
    best_ratios = {peer: ratio["value"] for peer, ratio in ratios_of.get(best, {}).items() if peer not in ours}
    return {
        "clock": clock,
        "device": device,
        "rows": [*rows.values(), harness.row(PEAK, "FLOP/s", peaks)],
        "ours": best,
        "ratios": best_ratios,
        "ratios_of": ratios_of,
        "ratio": best_ratios.get(PEER),
        "flops_per_token": flops,
        "mfu_formula": MFU_FORMULA,
        "peak_flops": median(peaks),
        **{name: {"tokens_per_s": row["value"], "mfu": row["mfu"]} for name, row in rows.items()},
    }


def ratio_clock(device_type: str, threads: int, clocks: Sequence[str]) -> str:
    """Choose the clock for speed ratios: the device's clock, the CPU time of one thread, or wall time.

    CPU time varies less than wall time on a shared machine. With several threads it would also count threads that wait.
    """
    if "device" in clocks:
        return "device"
    if device_type == "cpu" and threads == 1:
        return "cpu"
    return "wall"


def _row(
    name: str, turns: Sequence[Mapping[str, Any]], work: Workload, clocks: Sequence[str], clock: str
) -> dict[str, Any]:
    tokens = work.steps * work.batch * work.seq_len
    by_clock = {}
    for one in clocks:
        rates = [tokens / turn[one] for turn in turns]
        by_clock[one] = {"value": median(rates), "rounds": rates}
    last = turns[-1]
    more = {key: last[key] for key in ("maker_flops", "first_step_s", "loss", "notes")}
    if CANDIDATES[name].compiled:
        more["compile_s"] = max(0.0, last["first_step_s"] - median(turn["step_s"] for turn in turns))
    return harness.row(
        name, "tokens/s", by_clock[clock]["rounds"], text=CANDIDATES[name].text, by_clock=by_clock, **more
    )


def _shown(result: Mapping[str, Any]) -> list[str | Table]:
    lines = [f"left out {name}: {reason}" for name, reason in result["left_out"].items()]
    notes = chain.from_iterable(row.get("notes", ()) for row in result["rows"])
    lines += dict.fromkeys(notes)
    candidates = [row for row in result["rows"] if row["name"] != PEAK]
    tables = [_speeds(result, candidates)]
    peers = [row["name"] for row in candidates if row["name"] not in result["ratios_of"]]
    if peers:
        tables.append(_ratios(result, peers))
    tables += [_parts(name, parts) for name, parts in result["breakdown"].items()]
    return [*lines, *tables]


def _speeds(result: Mapping[str, Any], candidates: Sequence[Mapping[str, Any]]) -> Table:
    clocks = candidates[0]["by_clock"]
    rows = []
    for row in candidates:
        speeds = [f"{row['by_clock'][clock]['value']:.0f}" for clock in clocks]
        mfu = f"{row['mfu']:.1%}"
        if row["mfu_of_maker"] is not None:
            mfu += f" ({row['mfu_of_maker']:.1%} of the maker's)"
        compiled = f"{row['compile_s']:.1f}" if "compile_s" in row else ""
        rows.append([row["text"], *speeds, mfu, compiled, f"{row['loss']:.3f}"])
    caption = (
        f"MFU of the GEMM peak, {result['peak_flops'] / 1e9:.0f} GFLOP/s in the same rounds, by "
        f"{CLOCKS[result['clock']]}: {result['mfu_formula']}; medians over {result['rounds']} rounds"
    )
    title = f"tokens/s, {result['precision']}, {result['threads']} threads"
    heads = ["candidate", *(CLOCKS[clock] for clock in clocks), "MFU", "compile s", "loss"]
    return harness.table(title, heads, rows, caption)


def _ratios(result: Mapping[str, Any], peers: Sequence[str]) -> Table:
    rows = []
    for peer in peers:
        cells = [peer]
        for ratios in result["ratios_of"].values():
            rounds = ratios[peer]["rounds"]
            cells.append(f"{ratios[peer]['value']:.2f}  ({min(rounds):.2f} to {max(rounds):.2f})")
        rows.append(cells)
    title = f"ratios of {CLOCKS[result['clock']]}"
    caption = "medians of the ratios inside each round, and their range"
    return harness.table(title, ["over", *result["ratios_of"]], rows, caption)


def _parts(name: str, parts: Mapping[str, Any]) -> Table:
    rows = []
    for kind, part in parts["kinds"].items():
        rows.append((kind, f"{1e3 * part['s']:.1f}", f"{part['share']:.1%}", f"{part['calls']:.0f}", KINDS[kind]))
    rows.append(("sum", f"{1e3 * parts['sum_s']:.1f}", f"{parts['sum_s'] / parts['step_s']:.1%} of the step", "", ""))
    caption = (
        f"wall time; the profiled step took {1e3 * parts['step_s']:.1f} ms, "
        f"and the median of the others {1e3 * parts['unprofiled_step_s']:.1f} ms"
    )
    heads = ("kind", "ms", "share", "operations", "content")
    return harness.table(f"one step of {name}, profiled", heads, rows, caption, left=("content",))
