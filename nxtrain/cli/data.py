"""Commands of `nxtrain data`; each imports its implementation when it is called."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nxtrain.cli.options import AsJson, integer
from nxtrain.common.errors import ConfigError
from nxtrain.common.io.hub import SCHEME as HUB
from nxtrain.common.io.hub import model_named
from nxtrain.common.io.paths import BUCKET_FORMS, is_bucket, local
from nxtrain.common.process.document import write_document
from nxtrain.config.bounds import MAX_INT

if TYPE_CHECKING:
    from nxtrain.common.io.object_store import Location

data = typer.Typer(no_args_is_help=True, help="Prepare a corpus, inspect one, and store the tokens of a teacher.")

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("kmgt", start=1)}


def _path(text: str) -> Path:
    """Parse a path on this machine, and expand the home folder."""
    try:
        return Path(local(text))
    except ValueError as error:
        raise ConfigError(f"{text}: {error}") from error


def _location(text: str) -> Location:
    """Parse a path on this machine, or an address in object storage; typer declares both as paths."""
    from nxtrain.common.io.object_store import location_of

    if is_bucket(text):
        return location_of(text)
    return _path(text)


def _source(text: str) -> Any:
    """Parse a source: a path, an address in object storage, or a data set of the Hub."""
    if not text.startswith(HUB):
        return _location(text)
    from nxtrain.data.arrow.hub_files import HubAddress

    return HubAddress.parse(text)


def _tokenizer(text: str) -> Path:
    """Parse the path of a tokenizer, or a model of the Hub, whose tokenizer is downloaded."""
    if model_named(text) is None:
        return _path(text)
    from nxtrain.config.model_folder import tokenizer_folder

    return tokenizer_folder(text)


def _output(text: str) -> Path:
    """Parse the path of an output file on this machine; raise an error for an address in object storage."""
    if is_bucket(text):
        prefix = text.rpartition("/")[0]
        raise ConfigError(f"--out {text} is not on this machine; give a local file, and add --upload {prefix}")
    return _path(text)


def _prefix(text: str) -> str:
    if not is_bucket(text):
        raise ConfigError(f"--upload {text} is not an address in object storage; give {BUCKET_FORMS}")
    return text


def _num_bytes(text: str | int) -> int:
    """Parse a number of bytes, such as 512MiB or 2GB."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?) ?([kmgt]?i?)b?", str(text).lower())
    size = -1
    if match is not None and match[2] in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2]])
    if not 0 <= size <= MAX_INT:
        raise typer.BadParameter(f"{text} is not a size; give a number of bytes, or one such as 512MiB or 2GB")
    return size


Tokenizer = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder with tokenizer.json, the file, or ORG/NAME of a model of the Hub.",
        show_default=False,
        parser=_tokenizer,
    ),
]
Field = Annotated[str, typer.Option(metavar="NAME", help="Field or column that holds the documents.")]
Lines = Annotated[bool, typer.Option("--lines", help="Each line of a text file is a document, not the file.")]
Mixed = Annotated[bool, typer.Option("--mixed", help="A folder may hold text and other formats; take all of it.")]
Only = Annotated[str, typer.Option(metavar="GLOB", help="Read only files of a folder with such names, as *.parquet.")]


@data.command(epilog="Example: nxtrain data prepare docs --only *.md --out runs/docs.arrow")
def prepare(
    src: Annotated[
        list[Path],
        typer.Argument(
            metavar="SRC",
            help="Files and folders; also s3://, gs:// or az://BUCKET/PREFIX, and hf://ORG/NAME/PATTERN@REVISION.",
            show_default=False,
            parser=_source,
        ),
    ],
    *,
    out: Annotated[Path, typer.Option(metavar="FILE.arrow", help="File to write.", show_default=False, parser=_output)],
    tokenizer: Tokenizer = None,
    on_bad: Annotated[
        Literal["stop", "skip"], typer.Option(help="At a row without a document: stop, or skip and count it.")
    ] = "stop",
    field: Annotated[
        str, typer.Option(metavar="NAME", help="Field or column of the documents; by default text, or messages.")
    ] = "",
    prompt: Annotated[
        str, typer.Option(metavar="NAME", help="Field or column of prompts, which come before and are not targets.")
    ] = "",
    chat: Annotated[
        bool, typer.Option("--chat", help="Documents are conversations: write them by the tokenizer's chat template.")
    ] = False,
    pairs: Annotated[
        bool,
        typer.Option("--pairs", help="Rows are pairs: prompt, chosen, rejected; strings, or with --chat turns."),
    ] = False,
    labels: Annotated[
        bool,
        typer.Option("--labels", help="Rows are answers: prompt, completion, label; strings, or with --chat turns."),
    ] = False,
    lines: Lines = False,
    only: Only = "",
    mixed: Mixed = False,
    shard_bytes: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE", help="Write a folder of files of this size, as 2GiB.", show_default=False, parser=_num_bytes
        ),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Delete what --out holds, finished or not.")] = False,
    upload: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Prefix in object storage for a copy, as s3://BUCKET/PREFIX.",
            show_default=False,
            parser=_prefix,
        ),
    ] = None,
) -> None:
    """Copy documents of text, JSON Lines, Parquet and Arrow files to one Arrow file, which training memory-maps.

    With a tokenizer the file holds token ids. After a kill, the same command continues, and writes the same bytes. A
    bad row stops the command with exit code 3, or is skipped, counted and written to FILE.bad.jsonl.
    """
    from nxtrain.common.io.atomic import naming
    from nxtrain.common.process.signals import noted
    from nxtrain.data.arrow.preparation import prepare_corpus
    from nxtrain.data.arrow.preparation_request import PreparationRequest
    from nxtrain.data.arrow.presentation import ConsoleWatcher

    if not field:
        field = "text"
        if chat and not (pairs or labels):
            field = "messages"
    kinds = {"pairs": pairs, "labels": labels}
    request = PreparationRequest(
        src, out, field, lines, only, tokenizer, shard_bytes or 0, on_bad, restart, prompt, chat, mixed, **kinds
    )
    with noted() as signals, ConsoleWatcher(signals) as watcher, naming(out):
        outcome = prepare_corpus(request, watcher)
    watcher.end(outcome)
    if upload is not None:
        from nxtrain.common.io.bucket import BucketPath
        from nxtrain.common.process.console import standard_error
        from nxtrain.data.arrow.upload import upload as copy

        is_new = copy(outcome.outputs, BucketPath(upload.rstrip("/")))
        said = "holds this corpus already"
        if is_new:
            said = "holds a copy"
        standard_error().print(f"{upload} {said}")


@data.command(epilog="Example: nxtrain data inspect docs --only *.md --json")
def inspect(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="Prepared corpus, or files that prepare reads.", show_default=False, parser=_location
        ),
    ],
    as_json: AsJson = False,
    seq_len: Annotated[int, integer(help="Tokens of a row, for the waste of packing.")] = 2048,
    tokenizer: Tokenizer = None,
    field: Field = "text",
    lines: Lines = False,
    only: Only = "",
    mixed: Mixed = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all of a prepared corpus, and compare it with its checksums.")
    ] = False,
) -> None:
    """Show sizes, document lengths, samples, and the padding of each packing method for a corpus.

    Damaged files, and files without a document, end the command with exit code 3.
    """
    from rich.console import Console

    from nxtrain.config.schema import DataConfig
    from nxtrain.data.arrow.inspection import inspect_corpus, refuse_incomplete, verify_corpus
    from nxtrain.data.arrow.presentation import present_inspection
    from nxtrain.data.storage import cache_folder

    cache = cache_folder(DataConfig())
    if verify:
        verify_corpus(path, cache)
    inspection = inspect_corpus(
        path, seq_len=seq_len, tokenizer=tokenizer, field=field, lines=lines, only=only, mixed=mixed, cache=cache
    )
    inspection["verified"] = verify
    if as_json:
        write_document(inspection)
    else:
        present_inspection(inspection, Console(markup=False, highlight=False, emoji=False))
    refuse_incomplete(inspection)


@data.command(epilog="Example: nxtrain data teach models/teacher --rows rows.npy --k 32 --out taught.npy")
def teach(
    model: Annotated[str, typer.Argument(metavar="RUN_OR_HF", help="Teacher: run, checkpoint or Hugging Face folder.")],
    rows: Annotated[str, typer.Option(help="Rows of data.source=tokens.", show_default=False)],
    out: Annotated[Path, typer.Option(help="File for data.teacher.", show_default=False, parser=_path)],
    k: Annotated[int, integer(help="Most likely tokens for each target.")] = 32,
) -> None:
    """Write a teacher's most likely tokens for each target of a token file, for distillation."""
    from nxtrain.cli.inference import EVAL_TOKENS, start_with_threads

    start_with_threads(model, "", tokens=EVAL_TOKENS)
    from nxtrain.tools.eval.teach import teach

    teach(model, rows, out, k)
