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
    """Parse a path on this machine; raise an error for an address in object storage."""
    if is_bucket(text):
        way_out = f"fetch or bring it there with: {copying(text, 'SRC DST')}"
        raise ConfigError(f"{text} is not a folder of this machine; {way_out}")
    return local_path(text)


def _target(text: str) -> Path:
    """Parse the path of a folder to write; a link stands for its target, which may be on another disk."""
    path = _on_disk(text)
    return path.resolve() if path.is_symlink() else path


def _model(text: str) -> Path:
    """Parse a Hugging Face folder on this machine, or a model of the Hub, whose files are downloaded."""
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
Target = Annotated[Path, typer.Argument(metavar="DST", show_default=False, parser=_target)]
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
        help="Hugging Face folder or ORG/NAME of an adapter's base weights; by default the one that it names.",
        parser=_model,
    ),
]
WeightsOnly = Annotated[bool, typer.Option("--weights-only", help="Convert no optimizer state.")]


def _warn_of_newer(src: str, checkpoint: Location) -> None:
    """Warn on standard error if newer checkpoints of the source were skipped as incomplete or damaged."""
    from nxtrain.checkpoint.mirror import choice_of

    warning = choice_of(src, checkpoint)
    if warning:
        typer.echo(warning, err=True)


@convert.command(epilog="Example: nxtrain convert hf-to-nxtrain Llama-3.2-1B checkpoints/llama3.2-1b")
def hf_to_nxtrain(src: Model, dst: Target) -> None:
    """Convert a Hugging Face folder, or a model of the Hub, to a checkpoint at step 0."""
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
    """Convert a checkpoint, the newest of a run folder or a mirror, to a Hugging Face folder.

    The adapter of a run with finetune.method=lora is merged into its base weights.
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
    """Average the weights of several checkpoints, and write the mean as a checkpoint at step 0."""
    from nxtrain.checkpoint.convert.average import average, sources_of

    sources = sources_of(src, last)
    average(sources, dst)
    typer.echo(f"{dst} holds the mean weights of {', '.join(source.name for source in sources)}")


@convert.command(epilog="Example: nxtrain convert ema runs/demo averaged; nxtrain eval averaged")
def ema(src: Checkpoint, dst: Target) -> None:
    """Write the running mean of the weights, of a run with optim.ema_decay, as a checkpoint at step 0."""
    from nxtrain.checkpoint.convert.average import running_mean
    from nxtrain.checkpoint.mirror import locate_checkpoint

    checkpoint = locate_checkpoint(src)
    _warn_of_newer(src, checkpoint)
    running_mean(checkpoint, dst)
    typer.echo(f"{dst} holds the running mean of the weights of {checkpoint}")


@convert.command(epilog="Example: nxtrain convert nxtrain-to-peft runs/chat chat-adapter")
def nxtrain_to_peft(src: Checkpoint, dst: Target) -> None:
    """Convert the adapter of a run with finetune.method=lora to PEFT's format."""
    from nxtrain.checkpoint.convert.hf import refuse_to_overwrite
    from nxtrain.checkpoint.convert.peft import DRAFTS, FILES, read_checkpoint, write_adapter
    from nxtrain.checkpoint.mirror import locate_checkpoint

    checkpoint = locate_checkpoint(src)
    _warn_of_newer(src, checkpoint)
    _, adapter = read_checkpoint(checkpoint)
    refuse_to_overwrite(dst, (*FILES, DRAFTS))
    write_adapter(dst, adapter)
    typer.echo(f"{dst} holds the adapter of {checkpoint}, in PEFT's format")


@convert.command(epilog="Example: nxtrain convert peft-to-hf runs/chat/adapter chat-hf --base Llama-3.2-1B")
def peft_to_hf(src: Source, dst: Target, base: Base = None) -> None:
    """Merge an adapter in PEFT's format into its base weights, and write a Hugging Face folder."""
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
            help="Hugging Face config.json of the model; by default the one in SRC or its parent folder.",
            parser=local_path,
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG",
            help="Configuration of the run that will resume, for its position in the data.",
            parser=local_path,
        ),
    ] = None,
    first_copy: Annotated[
        bool, typer.Option("--first-copy", help="If replicas on tp ranks differ, such as norms, use the first.")
    ] = False,
    weights_only: WeightsOnly = False,
) -> None:
    """Convert NeuronX Distributed's rank files of a Llama model to a checkpoint.

    SRC is a tag, or a folder of tags, whose newest finished tag is converted. Weights and AdamW state, with or without
    ZeRO-1, are read from files of save_checkpoint, also with use_xser.
    """
    from nxtrain.checkpoint.convert.nxd_read import nxd_to_nxtrain
    from nxtrain.config.load import load

    goes_on = None
    if run:
        goes_on = load(run).config
    meta = nxd_to_nxtrain(src, dst, config=shape, weights_only=weights_only, first_copy=first_copy, run=goes_on)
    typer.echo(f"{dst} holds {', '.join(meta.kinds)} at step {meta.step}")
    if meta.step and not meta.samples:
        typer.echo(
            "no run can resume from it, since NeuronX Distributed saves no position in the data; use --run CONFIG"
        )


@convert.command(epilog="Example: nxtrain convert nxtrain-to-nxd runs/demo nxd_ckpts --tp 8 --pp 2 --dp 4")
def nxtrain_to_nxd(
    src: Checkpoint,
    dst: Target,
    tp: Annotated[int, integer(0, MAX_SIZE, help="Tensor parallel ranks; 0: as in the run.")] = 0,
    pp: Annotated[int, integer(0, MAX_SIZE, help="Pipeline stages, split as by NxD; 0: as in the run.")] = 0,
    dp: Annotated[int, integer(0, MAX_SIZE, help="Ranks that shard the optimizer state; 0: as in the run.")] = 0,
    kv_replicator: Annotated[
        int,
        integer(0, MAX_SIZE, help="Replicas of each K/V head, kv_shared_group_size; 0: as few as tp needs."),
    ] = 0,
    qkv: Annotated[
        Literal["separate", "grouped", "fused"] | None,
        typer.Option(help="Separate q, k, v; the grouped query module (qkv_linear); or one matrix (fuse_qkv)."),
    ] = None,
    platform: Annotated[
        Literal["trn1", "trn2"], typer.Option(help="Platform whose order of replicated K/V heads is used.")
    ] = "trn1",
    zero1: Annotated[bool, typer.Option("--zero1/--no-zero1", help="Shard the optimizer state over dp.")] = True,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG",
            help="Configuration of the run, for its optimizer; by default the one in the run folder.",
            parser=local_path,
        ),
    ] = None,
    weights_only: WeightsOnly = False,
) -> None:
    """Convert a checkpoint, the newest of a run folder or a mirror, to NeuronX Distributed's rank files.

    DST gets a tag step_<step> for load_checkpoint, with the config.json of NxD's Llama example. NxD's scripts resume
    the optimizer and the learning-rate schedule, and start at the beginning of their data.
    """
    from nxtrain.checkpoint.convert.nxd_write import NxdTarget, nxtrain_to_nxd, optimizer_settings_of
    from nxtrain.checkpoint.mirror import locate_checkpoint

    rates = None
    if not weights_only:
        rates = optimizer_settings_of(src, run)
    _warn_of_newer(src, locate_checkpoint(src))
    target = NxdTarget(tp, pp, dp, kv_replicator, qkv, platform, zero1)
    typer.echo(f"{nxtrain_to_nxd(src, dst, target, rates=rates)} is complete")
