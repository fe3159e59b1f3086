"""Command line of nxtrain; commands import their implementation lazily, so help and config errors need no torch."""

from __future__ import annotations

import inspect
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
import typer.core

import nxtrain
from nxtrain.cli import doctor, inference, inspection, launch, plan, report
from nxtrain.cli.bench import bench
from nxtrain.cli.convert import convert
from nxtrain.cli.data import data
from nxtrain.cli.options import AsJson, ConfigPath, FirstNode, Overrides, integer, number
from nxtrain.common.errors import ConfigError, NxtrainError, StoppedBySignal, explained
from nxtrain.common.io.paths import local_path
from nxtrain.common.process import garbage
from nxtrain.common.process.document import write_document
from nxtrain.common.process.placement import Placement
from nxtrain.common.process.streams import pipe_safe_streams
from nxtrain.common.run_folder import LOGS_DIR
from nxtrain.config.bounds import MAX_RANKS, MAX_SIZE

if TYPE_CHECKING:
    from nxtrain.config.schema import RunConfig


class _Group(typer.core.TyperGroup):
    """Group of all commands, whose messages about options have no words of pydantic."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command; its options are parsed here, too."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    name="nxtrain", cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
config = typer.Typer(no_args_is_help=True, help="Show the values of a configuration, and list all keys.")
cache = typer.Typer(no_args_is_help=True, help="Manage the compiled graphs of a node, and copy them between nodes.")
BEFORE = "Before a run"
RUN = "A run"
AFTER = "During a run, and after"
app.add_typer(config, name="config", rich_help_panel=BEFORE)
app.add_typer(data, name="data", rich_help_panel=BEFORE)
app.add_typer(cache, name="cache", rich_help_panel=BEFORE)
app.add_typer(bench, name="bench", rich_help_panel=BEFORE)
app.add_typer(convert, name="convert", rich_help_panel=AFTER)
app.command("plan", epilog=plan.EPILOG, rich_help_panel=BEFORE)(plan.plan)
app.command("inspect", epilog=inspection.EPILOG, rich_help_panel=BEFORE)(inspection.inspect_model)
app.command("doctor", epilog=doctor.EPILOG, rich_help_panel=BEFORE)(doctor.doctor)
app.command("launch", epilog=launch.EPILOG, rich_help_panel=RUN)(launch.launch)
app.command("watch", epilog=report.WATCH_EPILOG, rich_help_panel=AFTER)(report.watch)
app.command("report", epilog=report.EPILOG, rich_help_panel=AFTER)(report.report)
app.command("eval", epilog=inference.EVAL_EPILOG, rich_help_panel=AFTER)(inference.evaluate)
app.command("generate", epilog=inference.GENERATE_EPILOG, rich_help_panel=AFTER)(inference.generate)

CacheFolder = Annotated[
    str | None,
    typer.Argument(
        metavar="DIR",
        help="Cache, or a configuration file whose compile.cache_dir is meant. By default compile_cache/HOST.",
        show_default=False,
    ),
]
DEFECT = f"This is a defect of nxtrain {nxtrain.__version__}; report the lines above with the command and its files."
CACHE_HELP = "Folder, configuration file, or s3://, gs:// or az://BUCKET/PREFIX."


SPEAKER_S = 10.0
"""Seconds that a rank waits for the first rank of its node before it prints a problem of the configuration itself."""


def main() -> None:
    """Run the command line; an expected error ends the process with its exit code, and without a traceback.

    A closed standard output or standard error changes neither the result of a command nor its exit code.
    """
    with pipe_safe_streams():
        try:
            app()
        except KeyboardInterrupt:  # typer handles one in a command, but not one while it builds the commands
            _end(128 + signal.SIGINT)
        except Exception as error:
            reason = explained(error)
            if reason is not None:
                _report(reason, _read_placement())
                _end(reason.exit_code)
            sys.excepthook(*sys.exc_info())
            if not isinstance(error, MemoryError):  # with code 1 the launcher restarts, and may find enough memory
                print(DEFECT, file=sys.stderr)
            _end(1)


def _end(code: int) -> NoReturn:
    """Exit the process; exit immediately if an orderly exit would wait for other ranks or for an upload."""
    if _read_placement().is_alone and not _has_uploads_underway():
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader may have exited, and a scheduler needs the exit code
            stream.flush()
    os._exit(code)


def _read_placement() -> Placement:
    """Return the ranks of this process; those of a single process if the environment variables are invalid."""
    try:
        return Placement.read()
    except NxtrainError:
        return Placement()


def _has_uploads_underway() -> bool:
    """True if uploads to the mirror are still running, for which the process does not wait."""
    uploads = sys.modules.get("nxtrain.checkpoint.mirror_uploads")
    return uploads is not None and uploads.are_underway()


def _report(error: NxtrainError, placement: Placement) -> None:
    try:
        from rich.text import Text

        from nxtrain.common.process.console import standard_error
    except ImportError:  # perhaps this import is the error to report
        print(f"error: {error}", file=sys.stderr)
        return
    # Every rank of a node finds the same problem of configuration and environment; other failures differ by rank.
    # An agent ends all ranks after the first that fails. So the others wait until the first rank of the node has
    # printed the problem, and print it themselves if they still run.
    if isinstance(error, ConfigError) and not placement.speaks_for_node:
        if not placement.has_agent:
            return
        time.sleep(SPEAKER_S)
    # All ranks stop together, which is not an error.
    if isinstance(error, StoppedBySignal):
        if placement.is_leader:
            standard_error().print(str(error))
        return
    console = standard_error()
    is_of_all = not placement.is_launched or (isinstance(error, ConfigError) and placement.is_leader)
    prefix = ""
    if not is_of_all:
        prefix = f"rank {placement.rank}: "
    blocks = [str(error)]
    if isinstance(error, ConfigError):
        blocks = [str(problem) for problem in error.problems]
    for block in blocks:
        console.print(Text.assemble(("error: ", "bold red"), f"{prefix}{block}"))


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


@app.command(
    rich_help_panel=RUN,
    epilog="Example: torchrun --nproc-per-node 2 -m nxtrain train configs/demo.toml train.steps=100",
)
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train a model: with one rank, or with all ranks under torchrun."""
    from nxtrain.config.check import resolve_config
    from nxtrain.config.load import load

    placement = Placement.read()
    loaded = load(config, overrides or ())
    resolved = resolve_config(loaded, placement.world)  # before torch is imported
    if placement.is_leader and not loaded.sets_anything:
        print(f"warning: {config} sets nothing, so that all values are defaults or overrides", file=sys.stderr)
    from nxtrain.common.process.clock import process_began
    from nxtrain.common.process.signals import noted
    from nxtrain.launch.debug import open_debug_folder
    from nxtrain.launch.neuron import reexec_with_environment

    reexec_with_environment(loaded.config, os.environ, placement.local_world)
    note = open_debug_folder(loaded.config, is_alone=placement.is_alone)
    if note and placement.is_leader:
        print(note, file=sys.stderr)
    with noted() as signals:  # from here on, since torch takes seconds to import
        from nxtrain.tools.compile.miss_watch import watch_misses
        from nxtrain.train.command import train

        garbage.settle()
        faults = os.environ.get("NXTRAIN_FAULTS")
        if faults:
            from nxtrain.common.testing.faults import arm

            arm(faults, loaded.config.run.dir, placement.rank)
        with watch_misses(resolved, os.environ):
            train(loaded, resolved, signals, process_began())
    if placement.is_leader:
        from nxtrain.metrics.start_log import read
        from nxtrain.plan.goodput import advice

        line = advice(read(loaded.config.run.dir / LOGS_DIR), loaded.config.checkpoint.every)
        if line:  # another checkpoint interval would save much time
            typer.echo(line, err=True)
    if _has_uploads_underway():
        _end(0)


@app.command(
    name="compile",
    rich_help_panel=BEFORE,
    epilog="Example: nxtrain compile configs/llama2_7b_trn1.toml cluster.nodes=1 parallel.dp=4",
)
def compile_(
    config: ConfigPath,
    overrides: Overrides = None,
    nproc: Annotated[
        int | None,
        integer(1, MAX_RANKS, help="Ranks per machine, as in the run; by default tp x cp x pp x dp / nodes."),
    ] = None,
    first_node: FirstNode = "",
    workers: Annotated[int | None, integer(help="Graphs at a time; by default one per 64 GiB of memory.")] = None,
    retries: Annotated[int, integer(0, MAX_SIZE, help="Times that failed graphs are tried again, on one machine.")] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print environment and command, start nothing.")] = False,
) -> None:
    """Compile every graph of a run on this node, before the run.

    Use the configuration, the overrides and --nproc of the run; only train.steps may differ. The command fills
    compile.cache_dir, and writes the manifest that compile.on_miss=stop checks. With backend.name=neuron it starts
    neuron_parallel_compile of the Neuron SDK, and trains nothing. With backend.name=neuron-native it starts the run for
    four steps in a temporary folder, on the devices or in TorchNeuron's compile-only mode; --workers and --retries have
    no effect. Each node needs its own cache: run this on all nodes at the same time with --first-node, and again if
    graphs failed. Or copy the graphs of one node: nxtrain cache sync SRC DST. A node with some pipeline stages only
    compiles their graphs, and writes their manifest.
    """
    from nxtrain.tools.compile.precompile import precompile

    precompile(
        config,
        overrides or [],
        nproc=nproc,
        first_node=first_node,
        workers=workers,
        retries=retries,
        dry_run=dry_run,
    )


@app.command(
    rich_help_panel=BEFORE,
    epilog="Example: nxtrain graphs configs/llama2_7b_trn1.toml --world 4096 model.config.num_hidden_layers=2",
)
def graphs(
    config: ConfigPath,
    overrides: Overrides = None,
    *,
    world: Annotated[int, integer(1, MAX_RANKS, help="Ranks of the world.", show_default=False)],
    rank: Annotated[
        list[int] | None,
        integer(0, MAX_RANKS, help="Rank to trace; repeat it for more. By default some of every kind."),
    ] = None,
    steps: Annotated[int, integer(help="Steps of each rank.")] = 3,
    hlo: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Save the graphs' HLO texts here.", parser=local_path)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the graphs that a run compiles, for any rank of any world size, on this CPU.

    The training step is traced and not executed. The command fails with exit code 5 if ranks or steps need different
    graphs, if a collective spans a group that is not an axis of the mesh, or if the host reads a value in a step.
    """
    from nxtrain.tools.trace.command import graphs, present

    traced = graphs(config, overrides or [], world=world, ranks=rank or [], steps=steps, hlo=hlo)
    present(traced, as_json=as_json)


@config.command(epilog="Example: nxtrain config show configs/demo.toml parallel.tp=4")
def show(
    config: ConfigPath,
    overrides: Overrides = None,
    schedule: Annotated[bool, typer.Option("--schedule", help="Draw the learning rate of each step instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print every configuration value with its origin, and check that the values fit together."""
    from nxtrain.config.check import resolve_config
    from nxtrain.config.load import load
    from nxtrain.config.show import dump, to_json

    loaded = load(config, overrides or ())
    if schedule:
        resolve_config(loaded, world=None)
        _show_schedule(loaded.config, as_json=as_json)
        return
    if as_json:
        write_document(to_json(loaded))
    else:
        typer.echo(dump(loaded.config, loaded.origins), nl=False)
    resolve_config(loaded, world=None)


def _show_schedule(config: RunConfig, *, as_json: bool) -> None:
    """Print the schedules of a run, such as the learning rate, as charts, or as JSON with steps and values."""
    from nxtrain.optim.schedule import Schedule, decay_factor, rule_schedules
    from nxtrain.optim.schedule_chart import draw, sampled

    train, schedule = config.train, Schedule.of(config)
    others = rule_schedules(config.optim)
    if as_json:
        at = sampled(train.steps)
        values = {"lr": list(map(schedule.at, at))}
        for name, of_name in others.items():
            values[name] = list(map(of_name.at, at))
        write_document({"pieces": schedule.describe(), "steps": at, **values})
        return
    if train.epochs:
        typer.echo(f"train.epochs={train.epochs:g} counts no steps yet; drawn for {train.steps:,} steps")
    typer.echo(draw(schedule, train.steps))
    for name, of_name in others.items():
        typer.echo(f"\n{name}\n{draw(of_name, train.steps)}")
    if config.optim.weight_decay_schedule != "constant":
        typer.echo(f"\nweight decay of an update: {decay_factor(config.optim)}")


@config.command(epilog="Example: nxtrain config keys | less")
def keys() -> None:
    """Print every configuration key with its type, its default and its description."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from nxtrain.config.show import keys

    table = Table("key", "type", "default", "what it is", box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = table.columns[2].no_wrap = True
    for key in keys():
        table.add_row(key.name, key.kind, key.default, key.doc)
    width = None
    if not sys.stdout.isatty():  # a file or a pipe has no width to fit
        width = 160
    Console(width=width, markup=False, highlight=False).print(table)


@cache.command("ls", epilog="Example: nxtrain cache ls /var/tmp/neuron-compile-cache --json")
def cache_ls(where: CacheFolder = None, as_json: AsJson = False) -> None:
    """List compiled graphs: done, failed, locked, stale (locked by a dead process) or pending."""
    from nxtrain.tools.compile.commands import ls

    ls(where, as_json)


@cache.command("verify", epilog="Example: nxtrain cache verify configs/llama2_7b_trn1.toml")
def cache_verify(where: CacheFolder = None) -> None:
    """Verify the hashes of every finished entry, hash new entries, and quarantine damaged entries (exit code 5)."""
    from nxtrain.tools.compile.commands import verify

    verify(where)


@cache.command("sync", epilog="Example: nxtrain cache sync s3://bucket/llama2-7b /var/tmp/neuron-compile-cache")
def cache_sync(
    src: Annotated[str, typer.Argument(metavar="SRC", help=CACHE_HELP, show_default=False)],
    dst: Annotated[str, typer.Argument(metavar="DST", help=CACHE_HELP, show_default=False)],
) -> None:
    """Copy every finished entry that DST lacks from SRC, and verify its hashes; many nodes may copy at once."""
    from nxtrain.tools.compile.commands import sync_caches

    sync_caches(src, dst)


@cache.command("clean", epilog="Example: nxtrain cache clean /var/tmp/neuron-compile-cache --max-gib 50")
def cache_clean(
    where: CacheFolder = None,
    max_gib: Annotated[
        float | None, number(0, 1e9, help="Keep this many GiB, of the entries that were used last.")
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Quarantine failed entries, so that they are compiled again.")
    ] = False,
    stale: Annotated[bool, typer.Option("--stale", help="Remove the locks of dead processes.")] = False,
) -> None:
    """Clean a cache; without options, like --failed --stale. Entries that a compiler is writing are not touched."""
    from nxtrain.tools.compile.commands import clean

    clean(where, max_gib, failed, stale)


def _join_lines(commands: typer.Typer) -> None:
    """Join the lines of each paragraph in the help of all commands, so that the terminal wraps them."""
    for command in commands.registered_commands:
        text = inspect.cleandoc(command.help or getattr(command.callback, "__doc__", "") or "")
        command.help = "\n\n".join(paragraph.replace("\n", " ") for paragraph in text.split("\n\n"))
    for group in commands.registered_groups:
        if group.typer_instance is not None:
            _join_lines(group.typer_instance)


_join_lines(app)
