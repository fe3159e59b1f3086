"""The page as HTML: hostile text stays text, every kind of folder renders, and nothing is loaded."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nxtrain.common.errors import ConfigError
from nxtrain.common.run_folder import CONFIG_FILE, ENVIRONMENT_FILE, LOGS_DIR, METRICS_FILE, STARTS_FILE, SUMMARY_FILE
from nxtrain.metrics.start_log import StartLog
from nxtrain.tools.report.command import report
from nxtrain.tools.report.comparison import Bounds, parity, scaling
from nxtrain.tools.report.page import render
from nxtrain.tools.report.run import read_run, read_runs, shortened
from tests.support.processes import patient_s
from tests.support.run_folders import record, restarted, start, write_run

PIECES = st.sampled_from(
    [
        *("<script>alert(1)</script>", "</style>", "</script>", "</title>", "<!--", "-->", "]]>", "<svg onload=x>"),
        *('"', "'", "`", "&", "&lt;", "&#60;", "<", ">", '" onmouseover="x', "' style='x", "{{ 7*7 }}", "{% raw %}"),
        *("javascript:x", "\u2028", "\u202e", "\ud800", "\x00", "\x1b[31m", "a", "run", " ", "\n", "\U0001f600", "=/"),
    ]
)
HOSTILE = st.lists(PIECES, min_size=1, max_size=5).map("".join).filter(lambda text: bool(text.strip()))


class Elements(HTMLParser):
    """Elements of a page with the names of their attributes, and its text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.comments: list[str] = []
        self.values: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        self.values += [value or "" for _, value in attrs]

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(page: str) -> Elements:
    elements = Elements()
    elements.feed(page)
    elements.close()
    return elements


def page_with(folder: Path, text: str) -> str:
    """Page of two runs that have a text wherever a text of a user or of another program can be."""
    records = [record(step, **({"alarm": text} if step == 30 else {})) for step in range(1, 61)]
    starts = restarted(60, why=text)
    toml = "".join(char for char in text if not 0xD800 <= ord(char) < 0xE000)  # TOML has no such characters
    for number in (1, 2):
        write_run(
            folder / str(number),
            name=f"{toml}{number}",
            records=records,
            starts=starts,
            environment={text: text, "device": [text]},
            cluster={"instance": f"{toml}x"},
            data={"path": toml, f"{toml}key": [toml, number]},
        )
    runs = read_runs([folder / "1", folder / "2"])
    points, notes = scaling(runs, price_usd_h=20.0)
    return render(runs, parities=[parity(runs[0], runs[1], Bounds())], points=points, notes=[*notes, text])


@pytest.fixture(scope="module")
def benign(tmp_path_factory: pytest.TempPathFactory) -> Elements:
    return parsed(page_with(tmp_path_factory.mktemp("benign"), "benign"))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=HOSTILE)
def test_no_text_of_a_user_becomes_an_element_or_an_attribute(tmp_path: Path, benign: Elements, text: str) -> None:
    page = page_with(tmp_path, text)
    page.encode()  # a file can hold the page
    result = parsed(page)
    assert result.elements == benign.elements
    assert result.comments == benign.comments == []
    shown = shortened(f"{text}1")
    if not any(0xD800 <= ord(char) < 0xE000 for char in text):
        assert shown in "".join(result.text)
        assert any(shown in value for value in result.values)  # in descriptions of charts, too


def test_a_page_loads_nothing_and_links_to_itself_only(tmp_path: Path) -> None:
    page = render(read_runs([write_run(tmp_path)]))
    result = parsed(page)
    names = {name for _, attributes in result.elements for name in attributes}
    assert not names & {"src", "srcset", "data", "action", "background", "poster", "xlink:href", "srcdoc"}
    assert not {tag for tag, _ in result.elements} & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert set(re.findall(r'href="([^"]*)"', page)) <= {f"#{name}" for name in re.findall(r' id="([^"]*)"', page)}
    assert not re.search(r"url\(|@import|https?://", page)
    assert "default-src &#39;none&#39;" in page or "default-src 'none'" in page


def test_a_page_has_what_a_run_recorded(tmp_path: Path) -> None:
    page = render(read_runs([write_run(tmp_path, name="seen")]))
    text = " ".join("".join(parsed(page).text).split())
    for wanted in ("Loss", "Gradient norm", "Learning rate", "Throughput", "Peak memory", "Goodput and restarts"):
        assert wanted in text
    assert "rank 1 was killed" in text
    assert "60 / 60" in text
    assert "spikes of the gradient norm1" in text.replace(" 1", "1")
    assert "no plan, since cluster.instance names no machine" in text


def empty(folder: Path) -> None:
    folder.mkdir()


def foreign(folder: Path) -> None:
    (folder / "lightning_logs").mkdir(parents=True)
    (folder / "hparams.yaml").write_text("lr: 1", encoding="utf-8")


def foreign_lines(folder: Path) -> None:
    folder.mkdir()
    (folder / METRICS_FILE).write_text('{"epoch": 1, "train_loss": 2}\n' * 5, encoding="utf-8")


def rubbish(folder: Path) -> None:
    write_run(folder, starts=[start(0, 60, began=100.0, outcome="")])
    (folder / METRICS_FILE).write_bytes(bytes(range(200, 256)) * 100)


def brackets(folder: Path) -> None:
    write_run(folder, starts=[start(0, 60, began=100.0, outcome="")])
    (folder / METRICS_FILE).write_text("[" * 100_000, encoding="utf-8")


def still_written(folder: Path) -> None:
    write_run(folder, starts=[start(0, 60, began=100.0, outcome="")])
    with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write('{"step": 61, "lo')


def folders_for_files(folder: Path) -> None:
    for name in (METRICS_FILE, CONFIG_FILE, SUMMARY_FILE, ENVIRONMENT_FILE, f"{LOGS_DIR}/{STARTS_FILE}"):
        (folder / name).mkdir(parents=True)


def one_step(folder: Path) -> None:
    write_run(folder, steps=1, starts=[start(0, 1, began=1.0)])


def nothing_finite(folder: Path) -> None:
    write_run(folder, records=[{"step": step, "loss": None, "grad_norm": None} for step in (1, 2)])


def wrong_kinds(folder: Path) -> None:
    write_run(
        folder, train={"steps": "many", "global_batch": [1]}, run={"name": 7}, cluster={"instance": 3, "nodes": "x"}
    )
    (folder / SUMMARY_FILE).write_text("[1]", encoding="utf-8")
    (folder / ENVIRONMENT_FILE).write_text('{"a": {"b": null}}', encoding="utf-8")


def unknown_machine(folder: Path) -> None:
    write_run(folder, cluster={"instance": "abacus.large"})


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (empty, "the folder is empty"),
        (foreign, "this is not a run folder of nxtrain"),
        (foreign_lines, "5 lines of metrics.jsonl are not records of nxtrain"),
        (rubbish, "metrics.jsonl is damaged: it holds no record"),
        (brackets, "metrics.jsonl is damaged: it holds no record"),
        (still_written, "the last line of metrics.jsonl has no end"),
        (folders_for_files, "metrics.jsonl cannot be read"),
        (one_step, ""),
        (nothing_finite, ""),
        (wrong_kinds, "summary.json holds no table"),
        (unknown_machine, ""),
    ],
)
def test_every_kind_of_folder_renders_and_says_what_is_missing(
    tmp_path: Path, make: Callable[[Path], None], said: str
) -> None:
    make(tmp_path / "run")
    whole = write_run(tmp_path / "whole")
    for folders in ([tmp_path / "run"], [whole, tmp_path / "run"], [tmp_path / "run", whole]):
        bounds = Bounds() if len(folders) > 1 else None
        done = report(folders, tmp_path / "page.html", bounds=bounds, scales=True)
        page = done.file.read_text(encoding="utf-8")
        assert said in "".join(parsed(page).text)
        assert any(said in line for line in done.lines)


def test_a_folder_that_is_no_run_gets_no_report_by_mistake(tmp_path: Path) -> None:
    """The parent of runs is the likeliest mistake, and a `report.html` of someone else may be there."""
    write_run(tmp_path / "runs" / "one")
    theirs = tmp_path / "runs" / "report.html"
    theirs.write_text("theirs", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"runs is not a run folder of nxtrain; name a run inside, .*runs/one"):
        report([tmp_path / "runs"])
    assert theirs.read_text(encoding="utf-8") == "theirs"
    foreign(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"name the folder of a run, .* or give --out"):
        report([tmp_path / "other", tmp_path / "runs" / "one"])
    empty(tmp_path / "new")
    assert report([tmp_path / "new"]).file.is_file()


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_render(tmp_path: Path, data: Any) -> None:
    folder = write_run(tmp_path / "run")
    for name in (METRICS_FILE, CONFIG_FILE, SUMMARY_FILE, ENVIRONMENT_FILE, f"{LOGS_DIR}/{STARTS_FILE}"):
        content = (folder / name).read_bytes()
        at = data.draw(st.integers(0, len(content)))
        noise = data.draw(
            st.one_of(st.binary(max_size=20), st.sampled_from([b"null", b"}{", b'"', b"\n[[", b"-1e999"]))
        )
        keep = data.draw(st.integers(0, 40))
        (folder / name).write_bytes(content[:at] + noise + content[at + keep :])
    runs = read_runs([folder, folder])
    parsed(render(runs, parities=[parity(runs[0], runs[1], Bounds())]))


def test_a_folder_whose_name_is_not_utf8_has_a_report(tmp_path: Path) -> None:
    folder = write_run(tmp_path / os.fsdecode(b"r\xf6n"))
    assert "/r?n" in report([folder]).file.read_text(encoding="utf-8")


def test_a_missing_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; name the folder of a run"):
        read_runs([tmp_path / "missing"])


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / item, name="same") for item in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == ["1: same", "2: same"]


@pytest.mark.parametrize("number", [10_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_many_restarts_are_one_small_page(tmp_path: Path, number: int) -> None:
    folder = write_run(tmp_path, starts=[])
    began = 0.0
    log = StartLog(tmp_path / "one")
    first = start(0, 5, began=began, outcome="failed", why="lost a rank")
    log.add("end", first)
    line = (tmp_path / "one" / STARTS_FILE).read_text(encoding="utf-8")
    length = first.seen.up - first.began.up
    (folder / LOGS_DIR).mkdir(exist_ok=True)
    with (folder / LOGS_DIR / STARTS_FILE).open("w", encoding="utf-8") as file:
        for at in range(number):
            moved = line.replace('"began": 0.0', f'"began": {at * length}')
            file.write(moved.replace(f'"up": {first.seen.up}', f'"up": {(at + 1) * length}'))
    run = read_run(folder)
    assert len(run.starts) == number
    page = render([run])
    assert f"{number - 60:,} starts in between are not listed" in page
    assert "The starts are too many to be drawn one by one" in page
    assert len(page) < 1_000_000


@pytest.mark.alone
@pytest.mark.parametrize(("lines", "limit_s"), [(100_000, 1.5), pytest.param(1_000_000, 5.0, marks=pytest.mark.slow)])
def test_a_long_run_is_read_fast_into_a_small_page(tmp_path: Path, lines: int, limit_s: float) -> None:
    folder = write_run(tmp_path)
    head, tail = json.dumps(record(7)).split('"step": 7', 1)
    with (folder / METRICS_FILE).open("w", encoding="utf-8") as file:
        file.writelines(f'{head}"step": {step}{tail}\n' for step in range(1, lines + 1))
    began = time.process_time()
    page = render(read_runs([folder]))
    assert time.process_time() - began < patient_s(limit_s)
    assert f"{lines:,} / 60" in page
    assert len(page.encode()) < 5_000_000
