"""The command line: a command is one lazy import and one call, so that help and config errors never wait for torch."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

import nxtrain
from nxtrain.cli_convert import convert
from nxtrain.errors import ConfigError, NxtrainError, StoppedBySignal

if TYPE_CHECKING:
    from nxtrain.config.load import Loaded
    from nxtrain.config.schema import RunConfig

app = typer.Typer(name="nxtrain", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
config = typer.Typer(no_args_is_help=True, help="Show what a configuration says, and which keys there are.")
bench = typer.Typer(no_args_is_help=True, help="Measure speed, beside other implementations, and memory.")
cache = typer.Typer(no_args_is_help=True, help="Look after the compiled graphs of a node, and share them with others.")
app.add_typer(config, name="config")
app.add_typer(cache, name="cache")
app.add_typer(convert, name="convert")
app.add_typer(bench, name="bench")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Values that win over the file's; the value is TOML or a bare word."),
]
CacheFolder = Annotated[
    str | None,
    typer.Argument(
        metavar="DIR",
        help="Cache, or a configuration file whose compile.cache_dir is meant. By default compile_cache/HOST.",
        show_default=False,
    ),
]
PLACE = "Folder, configuration file or s3://BUCKET/PREFIX."
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def main() -> None:
    """Run the command line; a failure meant for people ends in its message and its exit code, without a traceback."""
    try:
        app()
    except NxtrainError as error:
        _report(error, os.environ.get("RANK"), os.environ.get("LOCAL_RANK"))
        _end(error.exit_code)
    except Exception:
        if _is_alone():
            raise
        sys.excepthook(*sys.exc_info())
        _end(1)


def _end(code: int) -> NoReturn:
    """End the process; among several ranks at once, since an orderly end waits for what is under way with others."""
    if _is_alone():
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # whoever read it may be gone, and the code is what a scheduler goes by
            stream.flush()
    os._exit(code)


def _is_alone() -> bool:
    return os.environ.get("WORLD_SIZE", "1") == "1"


def _report(error: NxtrainError, rank: str | None, local_rank: str | None) -> None:
    from rich.text import Text

    from nxtrain.metrics.screen import standard_error

    # Every rank of a node finds the same mistake in configuration and environment; other failures are a rank's own.
    if isinstance(error, ConfigError) and (local_rank or rank) not in {None, "0"}:
        return
    # All ranks stop together, which is no error.
    if isinstance(error, StoppedBySignal):
        if rank in {None, "0"}:
            standard_error().print(str(error), markup=False)
        return
    console = standard_error()
    who = "" if rank is None or (isinstance(error, ConfigError) and rank == "0") else f"rank {rank}: "
    for block in error.problems if isinstance(error, ConfigError) else (error,):
        console.print(Text.assemble(("error: ", "bold red"), f"{who}{block}"))


def _load(path: Path, overrides: list[str] | None, world: int | None) -> Loaded:
    from nxtrain.config.check import resolve
    from nxtrain.config.load import load

    loaded = load(path, overrides or ())
    resolve(loaded, world)
    return loaded


def _advise(config: RunConfig) -> None:
    """Say it if another checkpoint interval would save much."""
    from nxtrain.metrics.goodput_log import read
    from nxtrain.plan.goodput import advice
    from nxtrain.train.recovery.attempts import LOGS

    if line := advice(read(config.run.dir / LOGS), config.checkpoint.every):
        typer.echo(line, err=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nxtrain {nxtrain.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train Llamas on Trainium, and the same model code on CUDA GPUs, CPU and PyTorch/XLA."""


@app.command(epilog="Example: torchrun --nproc-per-node 2 -m nxtrain train configs/demo.toml train.steps=20")
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train: one rank, or every rank under torchrun."""
    loaded = _load(config, overrides, world=int(os.environ.get("WORLD_SIZE", "1")))
    from nxtrain.launch.neuron import adopt
    from nxtrain.metrics.uptime import process_began
    from nxtrain.train.recovery.signals import noted

    adopt(loaded.config, os.environ, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    with noted() as signals:  # from here on, since torch takes seconds to import
        from nxtrain.compile.guard import guarded
        from nxtrain.train.run import train

        if faults := os.environ.get("NXTRAIN_FAULTS"):
            from nxtrain.train.faults import arm

            arm(faults, loaded.config.run.dir, int(os.environ.get("RANK", "0")))
        with guarded(loaded, os.environ):
            train(loaded, signals, process_began())
    if os.environ.get("RANK", "0") == "0":
        _advise(loaded.config)


@app.command(epilog="Example: nxtrain launch configs/demo.toml --nproc 2 run.dir=runs/mine")
def launch(
    config: ConfigPath,
    overrides: Overrides = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks per machine; by default tp x pp x dp / nodes.")
    ] = None,
    target: Annotated[str, typer.Option(help="Where: local is this machine.")] = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print environment and command, start nothing.")] = False,
) -> None:
    """Start every rank of a run, with the environment that its devices need."""
    if target != "local":
        raise ConfigError(f"--target {target} is not available in this release; use local")
    from nxtrain.launch.local import launch

    launch(config, overrides or [], nproc, dry_run)


@app.command(
    name="compile", epilog="Example: nxtrain compile configs/llama2_7b_trn1.toml cluster.nodes=1 parallel.dp=4"
)
def compile_(
    config: ConfigPath,
    overrides: Overrides = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks per machine, as in the run; by default tp x pp x dp / nodes.")
    ] = None,
    first_node: Annotated[
        str, typer.Option(metavar="NAME[:PORT]", help="With cluster.nodes above 1: one of them; the same on all.")
    ] = "",
    workers: Annotated[
        int | None, typer.Option(min=1, help="Graphs at a time; by default one per 64 GiB of memory.")
    ] = None,
    retries: Annotated[int, typer.Option(min=0, help="Times that what failed is tried again, on one machine.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print environment and command, start nothing.")] = False,
) -> None:
    """Compile every graph of a run on this node, before the run.

    Give it the configuration, the overrides and --nproc of the run; only train.steps may differ. It starts
    neuron_parallel_compile of the Neuron SDK, trains nothing, fills compile.cache_dir, and writes the manifest to which
    compile.on_miss=stop holds a run. Of several nodes each needs a cache of its own: start this on all of them at the
    same time with --first-node, and again if graphs failed, or fetch what one has compiled: nxtrain cache sync SRC DST.
    A node that holds some pipeline stages only compiles their graphs, and writes a manifest for these.
    """
    from nxtrain.compile.precompile import precompile

    precompile(
        config,
        overrides or [],
        nproc=nproc,
        first_node=first_node,
        workers=workers,
        retries=retries,
        dry_run=dry_run,
    )


@app.command(epilog="Example: nxtrain graphs configs/llama2_7b_trn1.toml --world 4096 model.config.num_hidden_layers=2")
def graphs(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    world: Annotated[int, typer.Option(min=1, help="Ranks of the world.", show_default=False)],
    rank: Annotated[
        list[int] | None, typer.Option(help="Rank to trace; repeat it for more. By default some of every kind.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each rank.")] = 3,
    hlo: Annotated[Path | None, typer.Option(metavar="DIR", help="Save the graphs' HLO texts here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the graphs that a compiler will get, for any rank of any world, on this CPU.

    The training step is traced and not executed. Fails with exit code 5 when ranks or steps need different graphs, when
    a collective spans a group that is no axis of the mesh, and when the host reads a value inside a step.
    """
    from nxtrain.graphs.command import graphs, present

    found = graphs(config, overrides or [], world=world, ranks=rank or [], steps=steps, hlo=hlo)
    present(found, as_json=as_json)


@app.command(epilog='Example: nxtrain generate runs/demo --prompt "def " --max-new-tokens 40')
def generate(
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="Run folder or checkpoint.", show_default=False)],
    prompt: Annotated[str, typer.Option(help="Text to continue.", show_default=False)],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among so many likeliest tokens; 0: all.")] = 50,
    seed: Annotated[int, typer.Option(help="Start of the randomness.")] = 0,
) -> None:
    """Continue a text with a trained model."""
    from nxtrain.train.generate import generate

    typer.echo(generate(checkpoint, prompt, max_new_tokens, temperature, top_k, seed))


@config.command(epilog="Example: nxtrain config show configs/demo.toml parallel.tp=4")
def show(config: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print every value and where it came from, then check that they fit together."""
    from nxtrain.config.check import resolve
    from nxtrain.config.load import load
    from nxtrain.config.show import dump, to_json

    loaded = load(config, overrides or ())
    typer.echo(json.dumps(to_json(loaded), indent=2) if as_json else dump(loaded.config, loaded.origins), nl=as_json)
    resolve(loaded, world=None)


@config.command(epilog="Example: nxtrain config keys | less")
def keys() -> None:
    """Print every key with its type, its default and what it does."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from nxtrain.config.show import keys

    table = Table("key", "type", "default", "what it is", box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = table.columns[2].no_wrap = True
    for key in keys():
        table.add_row(key.name, key.kind, key.default, key.doc)
    # Whoever reads a file or a pipe has no width to fit.
    width = None if sys.stdout.isatty() else 160
    Console(width=width, markup=False, highlight=False).print(table)


@cache.command("ls", epilog="Example: nxtrain cache ls /var/tmp/neuron-compile-cache --json")
def cache_ls(where: CacheFolder = None, as_json: AsJson = False) -> None:
    """List compiled graphs: done, failed, locked, stale (locked by somebody who is gone) or pending."""
    from nxtrain.compile.commands import ls

    ls(where, as_json)


@cache.command("verify", epilog="Example: nxtrain cache verify configs/llama2_7b_trn1.toml")
def cache_verify(where: CacheFolder = None) -> None:
    """Hold every done entry to its hashes; new ones get them, damaged ones go to the quarantine (exit code 5)."""
    from nxtrain.compile.commands import verify

    verify(where)


@cache.command("sync", epilog="Example: nxtrain cache sync s3://bucket/llama2-7b /var/tmp/neuron-compile-cache")
def cache_sync(
    src: Annotated[str, typer.Argument(metavar="SRC", help=PLACE, show_default=False)],
    dst: Annotated[str, typer.Argument(metavar="DST", help=PLACE, show_default=False)],
) -> None:
    """Copy every done entry of SRC that DST lacks, whole and checked; many nodes may do so at once."""
    from nxtrain.compile.commands import sync_places

    sync_places(src, dst)


@cache.command("clean", epilog="Example: nxtrain cache clean /var/tmp/neuron-compile-cache --max-gib 50")
def cache_clean(
    where: CacheFolder = None,
    max_gib: Annotated[float | None, typer.Option(min=0, help="Keep so many GiB; what was used last stays.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Put failed entries aside, to be compiled again.")] = False,
    stale: Annotated[bool, typer.Option("--stale", help="Break the locks of processes that are gone.")] = False,
) -> None:
    """Mend a cache; without an option, as with --failed --stale. What a compiler works on is left alone."""
    from nxtrain.compile.commands import clean

    clean(where, max_gib, failed, stale)


@bench.command("train", epilog="Example: nxtrain bench train --precision bf16 --threads 2")
def bench_train(
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: all cores.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each side runs, in turns.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps in each round.")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 4,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 512,
    precision: Annotated[Literal["bf16", "fp32"], typer.Option(help="Type of parameters and activations.")] = "bf16",
    as_json: AsJson = False,
) -> None:
    """Train the same model here and in Hugging Face transformers, and compare tokens per second."""
    from nxtrain.bench.train import bench_train

    bench_train(
        threads=threads,
        rounds=rounds,
        steps=steps,
        batch=batch,
        seq_len=seq_len,
        precision=precision,
        as_json=as_json,
    )


@bench.command("xla", epilog="Example: nxtrain bench xla --layers 32 --rounds 3")
def bench_xla(
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the model.")] = 8,
    micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each side runs, in turns.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Steps in each round.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure what PyTorch/XLA costs the host: milliseconds per step, beside transformers, and seconds to trace a rank.

    The model is so narrow that computing it takes next to nothing; what remains is to record, to hash and to launch.
    """
    from nxtrain.bench.xla import bench_xla

    bench_xla(layers=layers, micro_batches=micro_batches, rounds=rounds, steps=steps, as_json=as_json)


@bench.command("optim", epilog="Example: nxtrain bench optim --threads 1 --rounds 9")
def bench_optim(
    layers: Annotated[int, typer.Option(min=1, help="Blocks of the model whose parameters are updated.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Times that each rule runs, in turns.")] = 7,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: all cores.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Update parameters under every rule of precision.update, and compare with torch's fused AdamW."""
    from nxtrain.bench.optim import bench_optim

    bench_optim(layers=layers, rounds=rounds, threads=threads, as_json=as_json)


@bench.command("pipeline", epilog="Example: nxtrain bench pipeline --pp 2 --virtual-pp 2 --micro 4")
def bench_pipeline(
    pp: Annotated[int, typer.Option(min=1, help="Ranks, a process each.")] = 4,
    virtual_pp: Annotated[int, typer.Option(min=1, help="Model chunks of each rank.")] = 1,
    schedule: Annotated[
        Literal["1f1b", "zero_bubble"],
        typer.Option(help="As parallel.schedule; zero_bubble is measured in turn with 1f1b, and compared."),
    ] = "1f1b",
    micro: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 8,
    work: Annotated[
        Literal["sleep", "blocks"],
        typer.Option(help="What a chunk does: sleep, or compute blocks of a Llama, which wants a core per rank."),
    ] = "sleep",
    forward_ms: Annotated[
        float, typer.Option(min=0.1, help="Forward of a chunk that sleeps; its backward takes twice as long.")
    ] = 50.0,
    layers: Annotated[int, typer.Option(min=1, help="Blocks of a chunk that computes them.")] = 1,
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch, which is one sequence.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Steps; the shortest counts.")] = 5,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what is expected, start nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a pipeline of equal stages, draw it, and hold its bubble to (p-1)/(m*v+p-1).

    That is the share of the step in which p ranks of v chunks each idle, with m micro-batches and free transfers.

    With zero_bubble it is (p-1)*x/(m*(F+B+W)+(p-1)*x), x = F+max(0,B-W): times of forward, backward and weight part.
    """
    from nxtrain.bench.pipeline import StageWork, bench_pipeline

    stages = StageWork(pp, virtual_pp, schedule, micro, work, forward_ms / 1e3, layers, seq_len)
    bench_pipeline(work=stages, rounds=rounds, dry_run=dry_run, as_json=as_json)


@bench.command("checkpoint", epilog="Example: nxtrain bench checkpoint --mib 4096 --folder /mnt/nvme --check")
def bench_checkpoint(
    mib: Annotated[int, typer.Option(min=16, help="MiB of weights and optimizer state.")] = 1024,
    folder: Annotated[Path, typer.Option(help="Where to write; on the disk that is meant.")] = Path("."),
    rounds: Annotated[int, typer.Option(min=1, help="Times that each side runs, in turns.")] = 5,
    check: Annotated[bool, typer.Option("--check", help="Fail, with exit code 1, below the targets.")] = False,
    as_json: AsJson = False,
) -> None:
    """Save and load a state, and compare with the disk's own speed, torch.save and plain DCP."""
    from nxtrain.bench.checkpoint import bench_checkpoint

    if not bench_checkpoint(folder=folder, mib=mib, rounds=rounds, check=check, as_json=as_json):
        raise typer.Exit(1)


@bench.command("materialize", epilog="Example: nxtrain bench materialize --preset llama3.1-405b")
def bench_materialize(
    preset: Annotated[str, typer.Option(help="Model, as in model.preset.")] = "llama2-70b",
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel degree.")] = 32,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 8,
    stage: Annotated[int | None, typer.Option(min=0, help="Stage to make; by default a middle one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make one rank's shard of a big model in bf16; fails if that takes more than 1.3 times its bytes and 1 GiB."""
    from nxtrain.bench.materialize import bench_materialize

    bench_materialize(preset=preset, tp=tp, pp=pp, stage=stage, as_json=as_json)
