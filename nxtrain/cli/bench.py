"""Commands of `nxtrain bench`; each imports its implementation when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from nxtrain.cli.options import AsJson, integer, number
from nxtrain.common.io.paths import local_path
from nxtrain.config.bounds import MAX_SIZE

bench = typer.Typer(no_args_is_help=True, help="Measure speed and memory, and compare with other implementations.")

Chart = Annotated[
    Path | None, typer.Option(help="SVG file to draw the ratios into.", parser=local_path, metavar="FILE.svg")
]

Rounds = Annotated[int, integer(help="Times that each side runs, alternately.")]
Steps = Annotated[int, integer(help="Steps in each round.")]
Threads = Annotated[int, integer(0, MAX_SIZE, help="CPU threads; 0: all cores.")]
SeqLen = Annotated[int, integer(help="Tokens per sequence.")]
Precision = Annotated[Literal["bf16", "fp32"], typer.Option(help="Type of parameters and activations.")]
Device = Annotated[str, typer.Option(help="Device, as in backend.name.")]
Preset = Annotated[
    str, typer.Option(help="Model, as in model.preset, or FAMILY/PRESET; by default a Llama of 56 million.")
]


def _names(listed: str) -> list[str]:
    return [name.strip() for name in listed.split(",") if name.strip()]


@bench.command("train", epilog="Example: nxtrain bench train --threads 1 --batch 2 --chart ratios.svg")
def bench_train(
    candidates: Annotated[
        str,
        typer.Option(
            help="Commas between nxtrain, nxtrain_compiled, transformers_default, transformers, "
            "transformers_compiled, torchtitan; by default all that are installed."
        ),
    ] = "",
    threads: Threads = 0,
    rounds: Rounds = 3,
    steps: Steps = 2,
    batch: Annotated[int, integer(help="Sequences per step.")] = 4,
    seq_len: SeqLen = 512,
    precision: Precision = "bf16",
    preset: Preset = "",
    backend: Device = "cpu",
    stock_allocator: Annotated[
        bool, typer.Option("--stock-allocator", help="Give peers glibc's default settings, not nxtrain's.")
    ] = False,
    chart: Chart = None,
    as_json: AsJson = False,
) -> None:
    """Train the same model in nxtrain and in other trainers alternately, and compare tokens per second.

    Ratios use CPU time with one thread, the device's clock on GPUs, and wall time otherwise.
    """
    from nxtrain.tools.bench.train import bench_train, workload

    work = workload(
        steps=steps,
        batch=batch,
        seq_len=seq_len,
        precision=precision,
        preset=preset,
        threads=threads,
        backend=backend,
        stock=stock_allocator,
    )
    bench_train(work=work, candidates=_names(candidates), rounds=rounds, chart=chart, as_json=as_json)


@bench.command("scaling", epilog="Example: nxtrain bench scaling --layouts tp2,zero1 --batch 2")
def bench_scaling(
    layouts: Annotated[str, typer.Option(help="Commas between tp2, dp2, zero1, pp2; by default all.")] = "",
    rounds: Annotated[int, integer(help="Times that each runs, alternately.")] = 3,
    steps: Steps = 1,
    batch: Annotated[int, integer(help="Sequences per step and rank.")] = 4,
    seq_len: SeqLen = 512,
    precision: Precision = "bf16",
    preset: Preset = "",
    chart: Chart = None,
    as_json: AsJson = False,
) -> None:
    """Train with two ranks on this machine's CPU, and compare with one rank and with two simultaneous runs.

    Efficiency is tokens per second of two ranks, divided by those of two independent runs that share the machine.
    """
    from nxtrain.tools.bench.scaling import bench_scaling
    from nxtrain.tools.bench.train import workload

    work = workload(steps=steps, batch=batch, seq_len=seq_len, precision=precision, preset=preset)
    bench_scaling(work=work, layouts=_names(layouts), rounds=rounds, as_json=as_json, chart=chart)


@bench.command("collectives", epilog="Example: nxtrain bench collectives --sizes-kib 4,1024,65536")
def bench_collectives(
    ranks: Annotated[int, integer(2, MAX_SIZE, help="Processes, each with its device; an even number.")] = 2,
    sizes_kib: Annotated[str, typer.Option(help="KiB of the tensors, with commas.")] = "4,64,1024,16384",
    rounds: Annotated[int, integer(help="Times that each size is measured.")] = 5,
    backend: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure nxtrain's collectives between processes of this machine by tensor size, and compare with a memory copy.

    On GPUs each rank has its own GPU, and times are from the device's clock.
    """
    from nxtrain.tools.bench.collectives import CollectivesJob, bench_collectives

    # A word that is not a number counts as 0, which is refused with the other sizes that ranks cannot share.
    sizes = [int(size) if size.isdecimal() else 0 for size in _names(sizes_kib)]
    bench_collectives(job=CollectivesJob(ranks, sizes, backend), rounds=rounds, as_json=as_json)


@bench.command("data", epilog="Example: nxtrain bench data --mib 256 --seq-len 2048")
def bench_data(
    mib: Annotated[int, integer(help="MiB of token ids, two bytes each.")] = 64,
    text_mib: Annotated[int, integer(1, 10, help="MiB of text to tokenize and pack, at most 10.")] = 4,
    file_mib: Annotated[int, integer(help="MiB of the sparse corpus to open.")] = 10240,
    seq_len: SeqLen = 1024,
    rounds: Rounds = 3,
    as_json: AsJson = False,
) -> None:
    """Measure the tokens per second that one core reads for training, and compare with numpy's copy of random rows.

    Also measure tokenizing and packing, compared with the tokenizer alone, and the start on a large prepared corpus.
    """
    from nxtrain.tools.bench.data import bench_data

    sizes = {"mib": mib, "text_mib": text_mib, "file_mib": file_mib, "seq_len": seq_len}
    bench_data(sizes, rounds=rounds, as_json=as_json)


@bench.command("xla", epilog="Example: nxtrain bench xla --layers 32 --rounds 3")
def bench_xla(
    layers: Annotated[int, integer(help="Blocks of the model.")] = 8,
    micro_batches: Annotated[int, integer(help="Micro-batches per step.")] = 2,
    rounds: Rounds = 5,
    steps: Steps = 5,
    as_json: AsJson = False,
) -> None:
    """Measure the host time of PyTorch/XLA per step, compared with transformers, and the time to trace a rank.

    The model is so narrow that its computation takes almost no time. The rest is recording, hashing and launching
    graphs.
    """
    from nxtrain.tools.bench.xla import bench_xla

    bench_xla(layers=layers, micro_batches=micro_batches, rounds=rounds, steps=steps, as_json=as_json)


@bench.command("optim", epilog="Example: nxtrain bench optim --threads 1 --rounds 9")
def bench_optim(
    name: Annotated[Literal["adamw", "muon"], typer.Option(help="Optimizer, as optim.name.")] = "adamw",
    layers: Annotated[int, integer(help="Blocks of the model whose parameters are updated.")] = 2,
    rounds: Annotated[int, integer(help="Times that each rule runs, alternately.")] = 7,
    threads: Threads = 1,
    backend: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure optimizer updates under every rule of precision.update, and compare with torch's AdamW or Muon."""
    from nxtrain.tools.bench.optim import bench_optim

    bench_optim(name=name, layers=layers, rounds=rounds, threads=threads, as_json=as_json, device=backend)


@bench.command("attention", epilog="Example: nxtrain bench attention --longest 16384 --rounds 3")
def bench_attention(
    longest: Annotated[int, integer(2048, 1 << 20, help="Tokens of the longest row, from 1024.")] = 32768,
    rounds: Rounds = 3,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Measure time and memory of attention within documents by sequence length, and compare with a full mask."""
    from nxtrain.tools.bench.attention import bench_attention

    bench_attention(longest=longest, rounds=rounds, threads=threads, as_json=as_json)


@bench.command("pipeline", epilog="Example: nxtrain bench pipeline --pp 2 --virtual-pp 2 --micro 4")
def bench_pipeline(
    pp: Annotated[int, integer(help="Ranks, a process each.")] = 4,
    virtual_pp: Annotated[int, integer(help="Model chunks of each rank.")] = 1,
    schedule: Annotated[
        Literal["1f1b", "zero_bubble"],
        typer.Option(help="As parallel.schedule; zero_bubble is measured in turn with 1f1b, and compared."),
    ] = "1f1b",
    micro: Annotated[int, integer(help="Micro-batches per step.")] = 8,
    forward_ms: Annotated[
        float,
        number(0.1, 1e9, help="Forward of a chunk, which sleeps, or multiplies on a device; its backward takes twice."),
    ] = 50.0,
    seq_len: Annotated[int, integer(help="Tokens of a micro-batch, which is one sequence.")] = 32,
    rounds: Annotated[int, integer(help="Steps; the shortest counts.")] = 5,
    backend: Device = "cpu",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what is expected, start nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a pipeline of equal stages, draw its schedule, and compare its bubble with (p-1)/(m*v+p-1).

    The bubble is the share of the step in which ranks are idle: p ranks, v chunks per rank, m micro-batches, and
    transfers that take no time.

    With zero_bubble the bubble is (p-1)*x/(m*(F+B+W)+(p-1)*x), x = F+max(0,B-W), for the times F of forward, B of
    backward and W of the weight part.
    """
    from nxtrain.tools.bench.pipeline import StageWork, bench_pipeline

    stages = StageWork(pp, virtual_pp, schedule, micro, forward_ms / 1e3, seq_len, backend)
    bench_pipeline(work=stages, rounds=rounds, dry_run=dry_run, as_json=as_json)


@bench.command("checkpoint", epilog="Example: nxtrain bench checkpoint --mib 4096 --folder /mnt/nvme --check")
def bench_checkpoint(
    mib: Annotated[int, integer(16, MAX_SIZE, help="MiB of weights and optimizer state, at least 16.")] = 1024,
    folder: Annotated[Path, typer.Option(help="Folder to write to, on the disk to measure.", parser=local_path)] = Path(
        "."
    ),
    rounds: Rounds = 3,
    check: Annotated[bool, typer.Option("--check", help="Fail, with exit code 1, below the targets.")] = False,
    as_json: AsJson = False,
) -> None:
    """Save and load weights and optimizer state, and compare with the disk's speed, torch.save and plain DCP."""
    from nxtrain.tools.bench.checkpoint import bench_checkpoint

    if not bench_checkpoint(folder=folder, mib=mib, rounds=rounds, check=check, as_json=as_json):
        raise typer.Exit(1)


@bench.command("materialize", epilog="Example: nxtrain bench materialize --preset llama3.1-405b")
def bench_materialize(
    preset: Annotated[str, typer.Option(help="Model, as in model.preset.")] = "llama2-70b",
    tp: Annotated[int, integer(help="Tensor parallel degree.")] = 32,
    pp: Annotated[int, integer(help="Pipeline stages.")] = 8,
    stage: Annotated[int | None, integer(0, MAX_SIZE, help="Stage to initialize; by default a middle one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Initialize one rank's shard of a large bf16 model; fail above 1.3 times its bytes plus 1 GiB of memory."""
    from nxtrain.tools.bench.materialize import bench_materialize

    bench_materialize(preset=preset, tp=tp, pp=pp, stage=stage, as_json=as_json)
