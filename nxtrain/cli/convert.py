"""Commands of `nxtrain convert`; each imports its implementation when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nxtrain.cli.options import integer
from nxtrain.common.errors import ConfigError
from nxtrain.common.io.hub import model_named
from nxtrain.common.io.paths import copying, is_bucket, local_path
from nxtrain.config.bounds import MAX_SIZE

if TYPE_CHECKING:
    from nxtrain.common.io.object_store import Location

convert = typer.Typer(no_args_is_help=True, help="Convert checkpoints from and to other formats.")


def _on_disk(text: str) -> Path:
    """Path on this machine; refuses an address in object storage, which would otherwise be read as a local path."""
    if is_bucket(text):
        way_out = f"fetch or bring it there with: {copying(text, 'SRC DST')}"
        raise ConfigError(f"{text} is no folder of this machine; {way_out}")
    return local_path(text)


def _model(text: str) -> Path:
    """Hugging Face folder on this machine; files of a repository of the Hub are fetched."""
    if model_named(text) is None:
        return _on_disk(text)
    from nxtrain.config.model_folder import whole_folder

    return whole_folder(text, "")


Source = Annotated[Path, typer.Argument(metavar="SRC", show_default=False, parser=_on_disk)]
Model = Annotated[
    Path,
    typer.Argument(
        metavar="SRC", help="Hugging Face folder, or ORG/NAME@REVISION of the Hub.", show_default=False, parser=_model
    ),
]
Target = Annotated[Path, typer.Argument(metavar="DST", show_default=False, parser=_on_disk)]
Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="SRC", help="Run folder, checkpoint or mirror; s3://, gs:// and az:// too.", show_default=False
    ),
]
Base = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Hugging Face folder or ORG/NAME below an adapter; by default the one it names.",
        parser=_model,
    ),
]
WeightsOnly = Annotated[bool, typer.Option("--weights-only", help="Leave out the optimizer's state.")]


def _warn_of_newer(src: str, checkpoint: Location) -> None:
    """Warn on standard error if newer checkpoints of the source were passed over."""
    from nxtrain.checkpoint.mirror import choice_of

    warning = choice_of(src, checkpoint)
    if warning:
        typer.echo(warning, err=True)


@convert.command(epilog="Example: nxtrain convert hf-to-nxtrain Llama-3.2-1B checkpoints/llama3.2-1b")
def hf_to_nxtrain(src: Model, dst: Target) -> None:
    """Read a Hugging Face folder, or a model of the Hub, write a checkpoint."""
    from nxtrain.checkpoint.convert.hf import hf_to_nxtrain

    hf_to_nxtrain(src, dst)
    typer.echo(f"{dst} holds the weights of {src}, as a checkpoint at step 0")


@convert.command(epilog="Example: nxtrain convert nxtrain-to-hf runs/demo demo-hf --verify")
def nxtrain_to_hf(
    src: Checkpoint,
    dst: Target,
    verify: Annotated[
        bool, typer.Option("--verify", help="Load the result in transformers and compare scores.")
    ] = False,
    base: Base = None,
) -> None:
    """Read a checkpoint, the newest of a run folder or a mirror, write a Hugging Face folder.

    The adapter of a run with finetune.method=lora is added to the weights below it.
    """
    from nxtrain.checkpoint.convert.hf import nxtrain_to_hf

    checkpoint = nxtrain_to_hf(src, dst, base=base)
    _warn_of_newer(src, checkpoint)
    typer.echo(f"{dst} holds the weights of {checkpoint}, in Hugging Face's format")
    if verify:
        from nxtrain.backends import open_backend
        from nxtrain.checkpoint.convert.verify_export import verify_export

        result = verify_export(checkpoint, dst, open_backend("cpu"))
        line = f"transformers loads {dst}; its scores differ from ours by at most {result.difference:.2g}"
        if result.rounding:
            line += f", and rounding costs ours {result.rounding:.2f} of what it costs them"
        typer.echo(line)


@convert.command(epilog="Example: nxtrain convert average runs/demo averaged --last 3")
def average(
    src: Annotated[
        list[str],
        typer.Argument(metavar="SRC...", help="Checkpoints, or run folders with several.", show_default=False),
    ],
    dst: Target,
    last: Annotated[int, integer(0, MAX_SIZE, help="Newest checkpoints of each run folder; 0: all.")] = 0,
) -> None:
    """Read several checkpoints, write the mean of their weights as a checkpoint at step 0."""
    from nxtrain.checkpoint.convert.average import average, sources_of

    sources = sources_of(src, last)
    average(sources, dst)
    typer.echo(f"{dst} holds the mean weights of {', '.join(source.name for source in sources)}")


@convert.command(epilog="Example: nxtrain convert ema runs/demo averaged; nxtrain eval averaged")
def ema(src: Checkpoint, dst: Target) -> None:
    """Read a checkpoint of a run with optim.ema_decay, write its running mean of the weights as one at step 0."""
    from nxtrain.checkpoint.convert.average import running_mean
    from nxtrain.checkpoint.mirror import locate_checkpoint

    checkpoint = locate_checkpoint(src)
    _warn_of_newer(src, checkpoint)
    running_mean(checkpoint, dst)
    typer.echo(f"{dst} holds the running mean of the weights of {checkpoint}")


@convert.command(epilog="Example: nxtrain convert nxtrain-to-peft runs/chat chat-adapter")
def nxtrain_to_peft(src: Checkpoint, dst: Target) -> None:
    """Read a checkpoint of a run with finetune.method=lora, write its adapter in PEFT's format."""
    from nxtrain.checkpoint.convert.hf import refuse_to_overwrite
    from nxtrain.checkpoint.convert.peft import FILES, read_checkpoint, write_adapter
    from nxtrain.checkpoint.mirror import locate_checkpoint

    checkpoint = locate_checkpoint(src)
    _warn_of_newer(src, checkpoint)
    _, adapter = read_checkpoint(checkpoint)
    refuse_to_overwrite(dst, FILES)
    write_adapter(dst, adapter)
    typer.echo(f"{dst} holds the adapter of {checkpoint}, in PEFT's format")


@convert.command(epilog="Example: nxtrain convert peft-to-hf runs/chat/adapter chat-hf --base Llama-3.2-1B")
def peft_to_hf(src: Source, dst: Target, base: Base = None) -> None:
    """Read an adapter in PEFT's format, add it to the weights below it, write a Hugging Face folder."""
    from nxtrain.checkpoint.convert.hf import write_merged
    from nxtrain.checkpoint.convert.peft import merged_adapter

    write_merged(merged_adapter(src, base), dst)
    typer.echo(f"{dst} holds the weights below {src} with the adapter added, in Hugging Face's format")


@convert.command(epilog="Example: nxtrain convert nxd-to-nxtrain nxd_ckpts/step_2000 from-nxd --config config.json")
def nxd_to_nxtrain(
    src: Source,
    dst: Target,
    shape: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="The model's Hugging Face config.json; by default that in SRC or beside it.",
            parser=local_path,
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG",
            help="The run that goes on from it, which says how far its data is by then.",
            parser=local_path,
        ),
    ] = None,
    first_copy: Annotated[
        bool, typer.Option("--first-copy", help="Where tp ranks differ in what they share, such as norms: the first.")
    ] = False,
    weights_only: WeightsOnly = False,
) -> None:
    """Read NeuronX Distributed's rank files, write a checkpoint.

    SRC is a tag, or a folder of tags, of which the last that was finished is taken. Weights of its Llama, and the state
    of AdamW with or without ZeRO-1, from files that save_checkpoint wrote, also with use_xser.
    """
    from nxtrain.checkpoint.convert.nxd_read import nxd_to_nxtrain
    from nxtrain.config.load import load

    goes_on = None
    if run:
        goes_on = load(run).config
    meta = nxd_to_nxtrain(src, dst, config=shape, weights_only=weights_only, first_copy=first_copy, run=goes_on)
    typer.echo(f"{dst} holds {', '.join(meta.kinds)} at step {meta.step}")
    if meta.step and not meta.samples:
        typer.echo("no run can go on from it: how much data it has seen is not kept there; say so with --run CONFIG")


@convert.command(epilog="Example: nxtrain convert nxtrain-to-nxd runs/demo nxd_ckpts --tp 8 --pp 2 --dp 4")
def nxtrain_to_nxd(
    src: Checkpoint,
    dst: Target,
    tp: Annotated[int, integer(0, MAX_SIZE, help="Tensor parallel ranks; 0: as in the run.")] = 0,
    pp: Annotated[int, integer(0, MAX_SIZE, help="Pipeline stages, as equal as NxD cuts them; 0: as in the run.")] = 0,
    dp: Annotated[int, integer(0, MAX_SIZE, help="Ranks that cut the optimizer's state; 0: as in the run.")] = 0,
    kv_replicator: Annotated[
        int,
        integer(0, MAX_SIZE, help="Copies of each K/V head, kv_shared_group_size; 0: as few as tp needs."),
    ] = 0,
    qkv: Annotated[
        Literal["separate", "grouped", "fused"] | None,
        typer.Option(help="q, k, v apart, in the module for grouped queries (qkv_linear), or one matrix (fuse_qkv)."),
    ] = None,
    platform: Annotated[Literal["trn1", "trn2"], typer.Option(help="How copied K/V heads are dealt out.")] = "trn1",
    zero1: Annotated[bool, typer.Option("--zero1/--no-zero1", help="The optimizer's state is cut over dp.")] = True,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG", help="The run, for its optimizer; by default that in its folder.", parser=local_path
        ),
    ] = None,
    weights_only: WeightsOnly = False,
) -> None:
    """Read a checkpoint, the newest of a run folder or a mirror, write NeuronX Distributed's rank files.

    In DST a tag step_<step> for its load_checkpoint, with config.json for the model of its Llama example. Its scripts
    go on with the optimizer and the schedule where the run was, and begin their data anew.
    """
    from nxtrain.checkpoint.convert.nxd_write import NxdTarget, nxtrain_to_nxd, optimizer_settings_of
    from nxtrain.checkpoint.mirror import locate_checkpoint

    rates = None
    if not weights_only:
        rates = optimizer_settings_of(src, run)
    _warn_of_newer(src, locate_checkpoint(src))
    target = NxdTarget(tp, pp, dp, kv_replicator, qkv, platform, zero1)
    typer.echo(f"{nxtrain_to_nxd(src, dst, target, rates=rates)} is complete")
