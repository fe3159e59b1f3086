"""A run that something befalls all the time; `scripts/soak.py` is the long one, of any seeds."""

from __future__ import annotations

import re
from html import unescape
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

from nxtrain.common.run_folder import LOGS_DIR
from nxtrain.common.testing.fault_kinds import KINDS
from nxtrain.common.testing.fault_points import POINTS, parse
from nxtrain.launch.torchrun import STOPPED
from nxtrain.metrics.start_log import read
from nxtrain.tools.report.chart import WIDTH
from nxtrain.tools.report.command import report as write_page
from tests.support.recovery import History
from tests.support.soak import MARGIN, drawn, soak


@pytest.mark.alone
@pytest.mark.slow
def test_whatever_befalls_a_run_it_stays_what_it_was(started_by: ForkServerContext, tmp_path: Path) -> None:
    report = soak(started_by, tmp_path, 6, steps=40, mean_steps=6.0, pace_s=0.1)
    assert report.faults >= 5
    assert report.restarts >= 3
    assert 2 * MARGIN < report.expected < 1.0, "what `soak` holds the goodput against says nothing here"
    assert report.goodput < 1.0
    assert_page_tells(report.history)


def assert_page_tells(history: History) -> None:
    """The page has each restart in its place: the time, the reason and the order, as its supervisor saw them.

    A start that is killed before it reads its checkpoint writes nothing, and is not a start on the page.
    """
    page = write_page([history.run]).file.read_text(encoding="utf-8")
    section = page.partition('<section id="timeline"')[2]
    table = section.partition("<thead>")[2].partition("</table>")[0]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)(?=<t[hd]|</tr>)", row) for row in table.split("<tr>")[2:]]
    rows = [[unescape(re.sub("<[^>]*>", "", cell)) for cell in row] for row in rows]
    logged = read(history.run / LOGS_DIR)
    first, total_s = logged[0].began, logged[-1].seen.up - logged[0].began.up
    lines = [float(at) for at in re.findall(r'class="restart" d="M([\d.]+) 0', section)]
    assert len(rows) == len(lines) + 1 == len(logged)
    left = iter(history.starts)
    for number, (row, at) in enumerate(zip(rows, [0.0, *lines], strict=True), 1):
        began_s = first.up + total_s * at / WIDTH
        seen = next(one for one in left if one.span_s[1] > began_s)  # each later than the one before
        assert seen.span_s[0] - 0.05 < began_s, "no start was running then"
        number_, resumed, last, _, _, outcome, why = row
        assert (int(number_), int(resumed)) == (number, seen.began_after), seen.said
        assert int(resumed) <= int(last) <= seen.reached
        assert (outcome == "done") == (seen.code == 0)
        said = "\n".join(seen.said.values())
        if outcome == "killed":
            assert seen.codes[0] is None or seen.codes[0] < 0, "rank 0 could have told"
        elif outcome == "failed":
            kind, _, text = why.partition(": ")
            assert text.split("\u2026")[0][:60] in " ".join(said.split()), (kind, text, said)
        elif outcome == "stopped":
            assert seen.code == STOPPED
            assert why in said


WORKER_KINDS = {"killworker", "stopworker"}


def test_the_long_one_draws_all_that_ends_or_hinders_a_run_at_every_point() -> None:
    result = [fault for seed in range(5) for text in drawn(seed, 2000, 20.0) for fault in parse(text)]
    # The data of the long run have no workers, and it evaluates nothing.
    assert {fault.point for fault in result} == {*POINTS} - {"eval", "log", "worker"}
    assert {fault.kind for fault in result} == {*KINDS} - {"sleep", "nan", "inf", "spike", "flip", *WORKER_KINDS}
    assert drawn(3, 200, 20.0) == drawn(3, 200, 20.0) != drawn(4, 200, 20.0)
