"""Progress of a run, on a terminal, in a log, and on a screen that is gone."""

from __future__ import annotations

import errno
import io
import random
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from rich.text import Text

from nxtrain.common.batch_sizes import BatchSizes
from nxtrain.common.process.console import PipeSafeConsole, standard_error
from nxtrain.metrics.progress import ProgressBar, open_progress
from nxtrain.metrics.status import KINDS_S, SECTIONS_S, Status, details

if TYPE_CHECKING:
    from tests.unit.metrics.conftest import FakeClock


def record(step: int, **more: float) -> dict[str, float | None]:
    return {"step": step, "loss": 5.0 - step / 100, "tokens_per_s": 12_345.0, "mfu": None, **more}


MEASURED = {"mfu": 0.0123, "grad_norm": 1.234, "data_s": 0.001, "training_s": 0.3, "log_s": 0.1, "saved_step": 50}
MEASURED |= {"forward_s": 0.1, "backward_s": 0.2, "peak_memory_bytes": 1 << 29, "goodput": 0.45}
SECTIONS = "forward 25% backward 50% waiting for ranks 0% other work 25%"


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    with io.StringIO() as text:
        yield text


def test_a_log_gets_the_first_line_the_last_one_evaluations_and_one_in_ten_seconds(
    log: io.StringIO, clock: FakeClock
) -> None:
    lines = open_progress(100, 0, console=Console(file=log, force_terminal=False), clock=clock)
    for step in range(1, 101):
        clock.now += 1.0
        lines.log(record(step, val_loss=4.0) if step == 33 else record(step))
    lines.close()
    printed = log.getvalue().splitlines()
    steps = [int(line.split()[1].removesuffix("/100")) for line in printed]
    assert steps == [1, 11, 21, 31, 33, 43, 53, 63, 73, 83, 93, 100]
    assert printed[0] == "step 1/100  loss 4.9900  12.3k tokens/s  0:00:01"
    assert printed[4] == "step 33/100  loss 4.6700  val 4.0000  12.3k tokens/s  0:00:33 0:01:07 left"
    assert printed[-1] == "step 100/100  loss 4.0000  val 4.0000  12.3k tokens/s  0:01:40 0:00:00 left"


def test_a_log_of_days_gets_one_line_a_minute(log: io.StringIO, clock: FakeClock) -> None:
    lines = open_progress(10_000, 0, console=Console(file=log, force_terminal=False), clock=clock)
    for step in range(1, 3000):
        clock.now += 1.0
        lines.log(record(step))
    lines.close()
    steps = [int(line.split()[1].removesuffix("/10000")) for line in log.getvalue().splitlines()]
    assert {after - before for before, after in pairwise(steps[:-1]) if before > 600} == {60}


def test_a_long_line_is_not_wrapped(log: io.StringIO, clock: FakeClock) -> None:
    lines = open_progress(10, 0, console=Console(file=log, width=20), clock=clock)
    lines.log(record(1))
    assert log.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (80, "MFU 1.2%  grad norm 1.23  data 0%"),
        (130, "MFU 1.2%  grad norm 1.23  data 0%  0.5 GiB  saved 50  goodput 45%"),
        (220, f"MFU 1.2%  grad norm 1.23  data 0%  0.5 GiB  saved 50  goodput 45%  {SECTIONS}"),
    ],
)
def test_a_line_has_the_most_important_numbers_that_fit(
    log: io.StringIO, clock: FakeClock, width: int, shown: str
) -> None:
    lines = open_progress(50, 0, console=Console(file=log, width=width), clock=clock)
    lines.log(record(50, val_loss=4.2345, **MEASURED))
    line = log.getvalue().rstrip("\n")
    assert line == f"step 50/50  loss 4.5000  val 4.2345  12.3k tokens/s  {shown}  0:00:00"
    assert len(line) <= max(100, width)


def test_a_terminal_gets_a_bar_with_step_loss_speed_and_time(log: io.StringIO, clock: FakeClock) -> None:
    bar = open_progress(200, 40, console=Console(file=log, force_terminal=True, width=120), clock=clock)
    bar.log(record(50, val_loss=4.25))
    clock.now += 60.0
    bar.log(record(100))
    bar.close()
    last = log.getvalue().rsplit("step", 1)[1]
    for words in ("100/200", "loss 4.0000", "val 4.2500", "12.3k tokens/s", "0:01:00", "0:02:00 left"):
        assert words in last
    assert "40/200" in log.getvalue()


@pytest.mark.parametrize(
    ("width", "bar", "elapsed"),
    [(160, 20, True), (96, 20, True), (95, 20, False), (80, 12, False), (73, 5, False), (72, 0, False)],
)
def test_a_narrow_terminal_has_every_number_and_a_shorter_bar(
    log: io.StringIO, clock: FakeClock, width: int, bar: int, elapsed: bool
) -> None:
    console = Console(file=log, force_terminal=True, width=width, color_system=None)
    shown = open_progress(3000, 0, console=console, clock=clock)
    shown.log(record(1, val_loss=4.25))
    clock.now += 100.0
    shown.log(record(3000, loss=4.0))
    shown.close()
    last = log.getvalue().rsplit("\x1b[2K", 1)[1].partition("\n")[0]
    assert "step 3000/3000" in last
    assert "loss 4.0000  val 4.2500  12.3k tokens/s" in last
    assert last.rstrip().endswith("0:00:00 left")
    assert (last.count("\u2501"), "0:01:40" in last) == (bar, elapsed)
    assert len(last) <= width


@pytest.mark.parametrize("width", [24, 30, 40, 50, 60, 72, 80, 100, 130])
@pytest.mark.parametrize("total", [50, 1_000_000])
def test_no_terminal_cuts_a_number(log: io.StringIO, clock: FakeClock, width: int, total: int) -> None:
    """A run of many steps has days left; what does not fit is left out whole, and the step last of all."""
    console = Console(file=log, force_terminal=True, width=width, color_system=None)
    shown = open_progress(total, 0, console=console, clock=clock)
    for step in (total // 2 - 10, total // 2):
        clock.now += 100.0
        shown.log(record(step, loss=4.5, val_loss=4.25, **MEASURED))
    shown.close()
    last = log.getvalue().rsplit("\x1b[2K", 1)[1].partition("\n")[0]
    assert f"step {total // 2}/{total}" in last and "\u2026" not in last
    assert len(last) <= width
    texts = ["loss 4.5000", " left", "val 4.2500", "12.3k tokens/s"]
    kept = [text in last for text in texts]
    assert kept == sorted(kept, reverse=True), "the most important stay"


def test_a_line_of_another_part_of_the_process_stands_above_the_bar(
    log: io.StringIO, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", log)
    monkeypatch.setattr(log, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    early = standard_error()
    bar = open_progress(10, 0, clock=clock)
    bar.log(record(1))
    early.print("of a part that began before the bar")
    standard_error().print("of a part that begins with the bar on the screen")
    standard_error(quiet=True).print("of a rank that is silent")
    bar.close()
    above = [re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r", "", line) for line in log.getvalue().splitlines()]
    assert "of a part that began before the bar" in above
    assert "of a part that begins with the bar on the screen" in above
    assert "silent" not in log.getvalue()


@pytest.mark.parametrize("seed", range(20))
def test_the_shares_of_a_line_add_up_to_all_of_the_time(seed: int) -> None:
    draw = random.Random(seed)
    times = {key: draw.choice([0.0, draw.random(), 100 * draw.random()]) for key in KINDS_S if draw.random() < 0.8}
    rest_s = times.setdefault("training_s", 1.0)
    for key in SECTIONS_S:
        times[key] = rest_s * draw.random()
        rest_s -= times[key]
    shown = " ".join(details(times))
    shares = {name.strip(): int(share) for name, share in re.findall(r"([a-z][a-z ]*) (-?\d+)%", shown)}
    assert sum(shares.values()) == 100
    spent_s = sum(times[key] for key in KINDS_S if key in times)
    names = {"data_s": "data", "waiting_s": "waiting for ranks"} | {key: key[:-2] for key in SECTIONS_S}
    for key, name in names.items():
        assert abs(shares[name] - 100 * times.get(key, 0.0) / spent_s) <= 1.0


class Dead(io.StringIO):
    """A stream whose reader is gone."""

    def __init__(self, error: OSError) -> None:
        super().__init__()
        self.error = error

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.EIO, "input/output error")])
def test_what_cannot_be_shown_is_dropped(error: OSError) -> None:
    screen = PipeSafeConsole(file=Dead(error), force_terminal=True)
    for _ in range(2):
        screen.print("a line", style="yellow")
        screen.print(Text("another"))
    assert not screen._buffer
    bar = ProgressBar(Status(10, BatchSizes(1)), 10, 0, screen, clock=lambda: 0.0)
    bar.log({"step": 1, "loss": 1.0, "tokens_per_s": 2.0})
    bar.close()
