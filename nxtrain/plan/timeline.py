"""Text diagram of a pipeline step, with one line for each rank and time from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from nxtrain.parallel.schedule import Action
from nxtrain.parallel.simulate import Span
from nxtrain.plan.pipeline import PipelineCosts, computations, elapsed_s

_CASES = 2
"""Number of chunks that upper and lower case letters can distinguish."""


def timeline(pipeline: PipelineCosts, spans: Sequence[Span] = (), width: int = 120) -> str:
    """Draw the timeline of a pipeline step as text, with a legend.

    Columns are as narrow as the labels allow. A step that does not fit is truncated, with a note.

    Args:
        pipeline: Pipeline to draw.
        spans: As in `figures`.
        width: Number of columns.
    """
    spans = computations(spans or pipeline.play())
    begin_s, step_s = min(span.start_s for span in spans), elapsed_s(spans)
    labels = [_label(span.action, pipeline.virtual_pp) for span in spans]
    columns_per_s = max(map(len, labels)) / min(span.end_s - span.start_s for span in spans)
    digits = len(str(pipeline.pp_size - 1))
    lines = [[f"rank {rank:<{digits}}  ", ""] for rank in range(pipeline.pp_size)]
    for span, label in zip(spans, labels, strict=True):
        start, end = (round((at_s - begin_s) * columns_per_s) for at_s in (span.start_s, span.end_s))
        line = lines[span.rank]
        line[1] = line[1].ljust(start, ".") + label[: end - start].ljust(end - start, "-")
    head, all_columns = len(lines[0][0]), round(step_s * columns_per_s)
    columns = min(all_columns, max(1, width - head))
    text = [name + line.ljust(all_columns, ".")[:columns] for name, line in lines]
    notes = [_legend(pipeline)]
    if columns < all_columns:
        shown = _time(step_s * columns / all_columns)
        notes.insert(0, f"the first {shown} of {_time(step_s)}; {head + all_columns} columns would show it all")
    indent = " " * head  # notes are indented like the lines of the ranks
    for note in notes:
        text.append(fill(note, width, initial_indent=indent, subsequent_indent=indent))
    return "\n".join(text)


def _label(action: Action, virtual_pp: int) -> str:
    """Label of an action; with two chunks, actions of the second are lower case, which takes no extra column."""
    if virtual_pp == _CASES and action.chunk == 1:
        return f"{'f' if action.kind == 'forward' else 'b'}{action.micro}"
    return str(action)


def _legend(pipeline: PipelineCosts) -> str:
    last = pipeline.num_micro - 1
    if pipeline.order == "zero_bubble":
        return (
            f"F{last} is the forward of micro-batch {last}, B{last} its backward but for the weights' gradients, and "
            f"W{last} these; dots are time without any"
        )
    text = f"F{last} is the forward and B{last} the backward of micro-batch {last}, dots are time without either"
    if pipeline.virtual_pp == _CASES:
        return f"{text}; small letters: the second chunk of the rank"
    if pipeline.virtual_pp > 1:
        return f"{text}; F{last}.1: chunk 1 of the rank, of 0 to {pipeline.virtual_pp - 1}"
    return text


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us"
