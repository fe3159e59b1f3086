"""HTML page of runs: one file that loads nothing, in which text of a run never becomes markup.

jinja2 escapes every value. A policy of the page allows its own script only, and no network.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from importlib.resources import files

from jinja2 import Environment, StrictUndefined, Template

import nxtrain
from nxtrain.common.text import short
from nxtrain.tools.report import facts
from nxtrain.tools.report.chart import HEIGHT, WIDTH
from nxtrain.tools.report.evaluations import evaluations
from nxtrain.tools.report.figures import breakdowns, charts
from nxtrain.tools.report.parity import Parity
from nxtrain.tools.report.ranks import rank_times
from nxtrain.tools.report.run import RecordedRun, printable, shortened
from nxtrain.tools.report.scaling import Point
from nxtrain.tools.report.timeline import USES, timeline

MOST_ALARMS = 100
"""Most alarms of a run that the page lists, the newest."""

MOST_TITLE = 160
"""Most characters of the page's title."""


def render(
    runs: Sequence[RecordedRun],
    *,
    parities: Sequence[Parity] = (),
    points: Sequence[Point] = (),
    notes: Sequence[str] = (),
    written: datetime | None = None,
) -> str:
    """HTML page of some runs.

    Args:
        parities: Comparisons with the first run.
        notes: Notes that concern no single run.
        written: Time on the page; None: now.
    """
    all_notes = [("all runs", note) for note in notes]
    alarms = []
    timelines = []
    for run in runs:
        all_notes += [(run.name, note) for note in run.notes]
        alarms += [(run.name, f"{step:,}", shortened(text, 300)) for step, text in run.columns.alarms[-MOST_ALARMS:]]
        drawn = timeline(run.starts)
        if drawn is not None:
            timelines.append((run.name, drawn, str(run.goodput)))
    content = {
        "runs": runs,
        "overview": facts.overview(runs),
        "notes": all_notes,
        "parities": parities,
        "points": points,
        "charts": charts(runs),
        "evaluations": evaluations(runs),
        "breakdowns": breakdowns(runs),
        "rank_times": [(run.name, *rank_times(run)) for run in runs],
        "timelines": timelines,
        "uses": USES,
        "stability": facts.stability(runs),
        "alarms": alarms,
        "plans": [(run.name, *facts.planned(run)) for run in runs],
        "environment": facts.environment(runs),
        "configuration": facts.configuration(runs),
    }
    moment = written or datetime.now(timezone.utc)
    script = _asset("page.js")
    return _template().render(
        content,
        title=shortened(", ".join(run.name for run in runs), MOST_TITLE),
        sections=[(key, name) for key, name in _SECTIONS.items() if _has(content, key)],
        version=nxtrain.__version__,
        version_line=f"nxtrain {nxtrain.__version__}",
        written=moment.strftime("%Y-%m-%d %H:%M %Z"),
        style=_asset("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        WIDTH=WIDTH,
        HEIGHT=HEIGHT,
    )


_SECTIONS = {
    "overview": "Overview",
    "parity": "Parity",
    "scaling": "Scaling",
    "curves": "Curves",
    "evaluations": "Evaluations",
    "breakdown": "Where time goes",
    "timeline": "Goodput and restarts",
    "stability": "Stability",
    "plan": "Plan",
    "configuration": "Configuration",
}

_NEEDS = {
    "parity": ("parities",),
    "scaling": ("points",),
    "curves": ("charts",),
    "evaluations": ("evaluations",),
    "breakdown": ("breakdowns",),
    "timeline": ("timelines",),
}


def _has(content: dict[str, object], key: str) -> bool:
    if key == "stability":
        return bool(_rows(content["stability"]))
    if key == "configuration":
        return bool(_rows(content["configuration"]) or _rows(content["environment"]))
    return all(content[name] for name in _NEEDS.get(key, ()))


def _rows(table: object) -> tuple[tuple[str, ...], ...]:
    assert isinstance(table, facts.Table)
    return table.rows


def _asset(name: str) -> str:
    return files("nxtrain.tools.report").joinpath(name).read_text(encoding="utf-8")


def _printable(value: object) -> object:
    """A value of the page; text is one line of characters that a file can hold, before jinja2 escapes it."""
    if type(value) is str:
        return printable(value)
    return value


@cache
def _template() -> Template:
    surroundings = Environment(
        autoescape=True, finalize=_printable, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    surroundings.filters["short"] = short
    return surroundings.from_string(_asset("page.html.j2"))
