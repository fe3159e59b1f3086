"""Commands `nxtrain generate` and `nxtrain eval`; each imports its implementation when it is called."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nxtrain.cli.options import AsJson, integer, number
from nxtrain.common.errors import ConfigError
from nxtrain.common.io.hub import model_named
from nxtrain.common.io.paths import local_path
from nxtrain.common.process.document import write_document
from nxtrain.common.process.placement import Placement
from nxtrain.config.bounds import MAX_INT, MAX_RANKS, MAX_SIZE

if TYPE_CHECKING:
    from nxtrain.tools.eval.trained import Trained

GENERATE_EPILOG = 'Example: nxtrain generate runs/demo --prompt "def " --max-new-tokens 40'

EVAL_EPILOG = "Example: nxtrain eval runs/demo --all; nxtrain eval runs/demo --tasks recipe"

EVAL_TOKENS = 1024
"""Typical number of tokens that an evaluation or a teacher computes in one forward pass, for the choice of threads."""

Seed = Annotated[int, integer(-MAX_INT, MAX_INT, help="Start of the randomness.")]

Cores = Annotated[
    str, typer.Option("--visible-cores", metavar="LIST", help="Neuron cores of the ranks, such as 0-3,8; one each.")
]


def generate(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CKPT",
            help="Run folder, checkpoint, mirror (in buckets too), Hugging Face folder or ORG/NAME of the Hub.",
            show_default=False,
        ),
    ],
    prompt: Annotated[
        list[str], typer.Option(help="Text to continue; repeat it to continue several at once.", show_default=False)
    ],
    max_new_tokens: Annotated[int, integer(1, MAX_INT, help="Tokens to add.")] = 64,
    temperature: Annotated[float, number(0, 1e9, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, integer(0, MAX_INT, help="Choose among so many likeliest tokens; 0: all.")] = 50,
    top_p: Annotated[
        float,
        number(1e-6, 1, help="Choose among the likeliest that have this probability together."),
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeat it for more.")
    ] = None,
    seed: Seed = 0,
    visible_cores: Cores = "",
    as_json: AsJson = False,
) -> None:
    """Generate a continuation of a text with a trained model; each token is printed at once.

    Under torchrun, the ranks shard the model by tensor parallelism, and rank 0 prints.
    """
    checkpoint = _on_storage(checkpoint)
    placement = start_with_threads(checkpoint, visible_cores, tokens=len(prompt))
    from nxtrain.common.process.console import standard_error
    from nxtrain.tools.eval.generate import GenerateRequest, Sampling
    from nxtrain.tools.eval.generate import generate as continue_texts

    request = GenerateRequest(tuple(prompt), max_new_tokens, seed, tuple(stop or ()))
    streams = placement.is_leader and not as_json and len(prompt) == 1

    def name_source(model: Trained) -> None:
        if placement.is_leader:
            _name_source(checkpoint, model, is_named=as_json)

    def show_piece(number: int, piece: str) -> None:
        typer.echo(piece, nl=False)

    model, texts = continue_texts(
        checkpoint, request, Sampling(temperature, top_k, top_p), show_piece if streams else None, name_source
    )
    if not placement.is_leader:
        return
    if as_json:
        content = [{**text.to_json(), "prompt": given} for given, text in zip(prompt, texts, strict=True)]
        write_document({"checkpoint": str(model.location), "step": model.step, "texts": content})
    elif streams:
        typer.echo()
    else:
        for number, text in enumerate(texts, 1):
            typer.echo(f"--- {number} of {len(texts)}\n{text.prompt}{text.text}")
    if not as_json and any(text.ending == "length" for text in texts):
        limit, length = model.config.longest_sequence
        standard_error().print(f"stopped at the model's length: {limit}={length} tokens")


def evaluate(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_HF",
            help="Run folder, checkpoint, mirror (in buckets too), Hugging Face folder or ORG/NAME of the Hub.",
            show_default=False,
        ),
    ],
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Suites or tasks, with :SHOTS for the number of solved examples: offline, held_out, cloze, copying, "
            "induction, arithmetic, recipe, or any of the lm-evaluation-harness; list shows them.",
            show_default="offline, without --pairs",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every checkpoint that is kept, not only the newest.")] = False,
    limit: Annotated[
        int,
        integer(0, MAX_SIZE, help="Most requests of a task; 0: 200 of a local task, all of the others."),
    ] = 0,
    seed: Seed = 0,
    task_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Your own tasks, in the harness's YAML.", parser=local_path),
    ] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.arrow", help="Pairs of answers, of data prepare --pairs: preferences.", parser=local_path
        ),
    ] = None,
    reference: Annotated[
        str, typer.Option(metavar="RUN_OR_HF", help="Model with which answers of pairs are compared, as in DPO.")
    ] = "",
    beta: Annotated[float, number(1e-9, 1e9, help="Factor of rewards relative to a reference.")] = 0.1,
    tp: Annotated[int, integer(1, MAX_RANKS, help="Ranks that share each model; others share the requests.")] = 1,
    visible_cores: Cores = "",
    as_json: AsJson = False,
) -> None:
    """Evaluate a trained model on offline tasks, on tasks of the lm-evaluation-harness, or on pairs of answers.

    Results are added to evaluations.jsonl in the run folder, and existing results are not computed again. Under
    torchrun, the ranks split the requests, or with --tp the model, and rank 0 prints.
    """
    names = tuple(name.strip() for name in (tasks or "").split(",") if name.strip())
    if tasks is not None and not names:
        raise ConfigError(f"--tasks {tasks!r} names no task; give NAME,..., or leave it out for the offline suite")
    if names in {("list",), ("help",)}:
        from nxtrain.tools.eval.suites import listed

        typer.echo(listed())
        return
    if reference and pairs is None:
        raise ConfigError(
            f"--reference {reference} is for pairs of answers only; give their file by --pairs FILE.arrow"
        )
    checkpoint = _on_storage(checkpoint)
    placement = start_with_threads(checkpoint, visible_cores, tokens=EVAL_TOKENS)
    from nxtrain.common.process.console import standard_error
    from nxtrain.tools.eval.command import Options, table
    from nxtrain.tools.eval.command import evaluate as evaluate_checkpoints

    if reference:
        reference = _on_storage(reference)
    options = Options(names, every, seed, limit, task_dir, tp, pairs, reference, beta)
    evaluations = evaluate_checkpoints(checkpoint, options, standard_error(quiet=not placement.is_leader).print)
    if not placement.is_leader:
        return
    if not every:
        _name_source(checkpoint, evaluations[0].model, is_named=True)
    content = [evaluation.to_json() for evaluation in evaluations]
    if as_json and every:
        write_document(content)
    elif as_json:
        write_document(content[0])
    else:
        typer.echo(table(evaluations))


def _on_storage(checkpoint: str) -> str:
    """Return the address of a model; a model of the Hub is downloaded to the cache of this machine."""
    if model_named(checkpoint) is None:
        return checkpoint
    from nxtrain.config.model_folder import whole_folder

    return str(whole_folder(checkpoint, ""))


def _name_source(address: str, model: Trained, *, is_named: bool) -> None:
    """Print the checkpoint found at an address, unless the output names it, and warn if a newer one is unusable."""
    from nxtrain.checkpoint.mirror import choice_of, is_same
    from nxtrain.common.io.object_store import location_of
    from nxtrain.common.process.console import standard_error

    if model.is_hf or is_same(location_of(address), model.location):
        return
    console = standard_error()
    if not is_named:
        console.print(f"from {model.location}, step {model.step:,}")
    warning = choice_of(address, model.location)
    if warning:
        console.print(warning)


def start_with_threads(checkpoint: str, visible_cores: str, tokens: int) -> Placement:
    """Restart the process with the right number of threads, and optionally its Neuron core; return its placement.

    Args:
        checkpoint: Address of the model.
        visible_cores: Neuron cores of all ranks; empty if the user names none.
        tokens: Tokens that a forward pass computes.
    """
    placement = Placement.read()
    from nxtrain.launch.neuron import reexec_for_inference, reexec_on_cores
    from nxtrain.tools.eval.model_shape import local_shape

    if visible_cores:
        reexec_on_cores(visible_cores, os.environ, placement.local_rank, placement.local_world)
    reexec_for_inference(local_shape(checkpoint), tokens, os.environ, placement.local_world)
    return placement
