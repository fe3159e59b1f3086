"""HTML page of the report: one file that loads nothing else and escapes all text of runs.

jinja2 escapes every value. The page's content security policy allows only its own script and no network access.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

import nxtrain
from nxtrain.common.text import short
from nxtrain.tools.report import facts
from nxtrain.tools.report.chart import HEIGHT, WIDTH
from nxtrain.tools.report.facts import rank_times
from nxtrain.tools.report.figures import breakdown, charts, evaluations
from nxtrain.tools.report.run import RecordedRun, printable, shortened
from nxtrain.tools.report.timeline import USES, timeline

MOST_ALARMS = 100  # maximum number of alarms that the page lists per run; the newest ones
MOST_TITLE = 160  # maximum length of the page's title in characters


def render(
    runs: Sequence[RecordedRun],
    *,
    parities: Sequence[Mapping[str, Any]] = (),
    points: Sequence[Mapping[str, Any]] = (),
    notes: Sequence[str] = (),
    written: datetime | None = None,
) -> str:
    """Render the HTML page of runs.

    Args:
        parities: Results of `parity`.
        points: Results of `scaling`.
        notes: Notes that belong to no single run.
        written: Time shown on the page; None: the current time.
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
    breakdowns = [breakdown(run) for run in runs]
    moment = written or datetime.now(timezone.utc)
    script = _asset("page.js")
    return _template().render(
        runs=runs,
        overview=facts.overview(runs),
        notes=all_notes,
        parities=parities,
        points=points,
        charts=charts(runs),
        evaluations=evaluations(runs),
        breakdowns=[areas for areas in breakdowns if areas is not None],
        rank_times=[(run.name, *rank_times(run)) for run in runs],
        timelines=timelines,
        uses=USES,
        stability=facts.stability(runs),
        alarms=alarms,
        plans=[(run.name, *facts.planned(run)) for run in runs],
        environment=facts.environment(runs),
        configuration=facts.configuration(runs),
        title=shortened(", ".join(run.name for run in runs), MOST_TITLE),
        version=nxtrain.__version__,
        written=moment.strftime("%Y-%m-%d %H:%M %Z"),
        style=_asset("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        WIDTH=WIDTH,
        HEIGHT=HEIGHT,
    )


def _asset(name: str) -> str:
    return files("nxtrain.tools.report").joinpath(name).read_text(encoding="utf-8")


def _printable(value: object) -> object:
    """Convert a template value: text becomes one line of printable characters, before jinja2 escapes it."""
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
