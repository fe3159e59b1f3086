"""Every line that a run, an export and a sample show is nxtrain's own, and the progress of a run is one moving line."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from nxtrain.tools.eval.generate import Sampling
from tests.support import ROOT
from tests.support.models import continued
from tests.support.processes import patient_s

_PARTS = re.compile(r"\x1b\[(?P<codes>[?\d;]*)(?P<kind>[A-Za-z])|(?P<move>[\r\n])|(?P<text>[^\x1b\r\n]+)")


@dataclass(frozen=True)
class Shown:
    """Output of a command on a terminal."""

    code: int
    raw: str

    @property
    def states(self) -> list[list[str]]:
        """The screen after each change, as lines without the spaces at their ends."""
        return _play(self.raw)

    @property
    def lines(self) -> list[str]:
        """Lines on the screen at the end, without blank ones."""
        return [line for line in (self.states or [[]])[-1] if line]


def on_terminal(
    argv: Sequence[str], *, cwd: Path, columns: int = 100, limit_s: float = 120.0, environ: Mapping[str, str] = {}
) -> Shown:
    """Run a command whose standard streams are a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    # torch-xla, which other tests import, sets PJRT_DEVICE, and then says nothing about its choice.
    # These tests also keep transformers from importing torch-xla, which then has no line to hide.
    unset = {"COLUMNS", "LINES", "NO_COLOR", "PJRT_DEVICE", "USE_TORCH_XLA"}
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    variables |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environ}
    process = subprocess.Popen(
        list(argv), cwd=cwd, env=variables, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    written, limit = b"", time.monotonic() + patient_s(limit_s)
    try:
        while time.monotonic() < limit:
            if not select.select([ours], [], [], 0.2)[0]:
                continue
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # Linux: nobody holds the other side any more
                part = b""
            if not part:
                return Shown(process.wait(patient_s(10)), written.decode())
            written += part
        raise TimeoutError(f"{argv} is not done after {limit_s:g} seconds: {written.decode()}")
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _play(raw: str) -> list[list[str]]:
    """The screen after each text, for the sequences that rich writes for a bar of one or more lines."""
    screen, row, column = [""], 0, 0
    states = []
    for part in _PARTS.finditer(raw):
        kind = part["kind"]
        if part["move"] == "\r":
            column = 0
        elif part["move"] == "\n":
            row += 1
            screen += [""] * (row + 1 - len(screen))
        elif kind == "A":
            row = max(0, row - int(part["codes"] or 1))
        elif kind == "K":
            screen[row] = "" if part["codes"] == "2" else screen[row][:column]
        elif kind in {"m", "h", "l"}:
            continue
        elif part["text"]:
            line = screen[row].ljust(column)
            screen[row] = line[:column] + part["text"] + line[column + len(part["text"]) :]
            column += len(part["text"])
            states.append([line.rstrip() for line in screen])
        else:
            raise AssertionError(f"a sequence that no screen of this test knows: {part[0]!r}")
    return states


NXTRAIN = (sys.executable, "-m", "nxtrain")
STEPS = 40

NUMBER = r"[\d.,]+(e-?\d+)?[kMG]?"
RUN = (
    r"# (ranks that each use all cores slow .*|a block of this model keeps no more threads busy, .* share is \d+)",
    r"export OMP_NUM_THREADS=\d+",
    rf"{re.escape(sys.executable)} -m nxtrain\.launch\.torchrun .* -m nxtrain train .*",
    r"backend cpu \(backend\.name=cpu\); 2 ranks: tp \d, dp \d",
    r"compiling the CPU collectives, once on this machine",
    rf"training a tokenizer of {NUMBER} entries on at most {NUMBER} bytes of text",
    rf"tokenizing {NUMBER} bytes of .+",
    r"(reading|training a tokenizer: .*|tokenizing).*: .*so far.*",
    r"CPU collectives: (shared memory, gloo between hosts|gloo, .*)",
    rf"parameter norm {NUMBER} at step 0; the initialization has {NUMBER} \+- {NUMBER}",
    rf"model llama, {NUMBER} parameters; data {NUMBER} rows of \d+ tokens; starts from scratch",
    rf"step +\d+/\d+ .*loss {NUMBER}  val {NUMBER}  {NUMBER} tokens/s .*",
    rf"goodput {NUMBER}% over 1 start: .* productive of .*; .*",
    rf"held-out loss {NUMBER} nats per token \(perplexity {NUMBER}\), {NUMBER} bits per byte; "
    rf"unigram entropy of the same tokens {NUMBER} \(perplexity {NUMBER}\)",
    r"checkpoint\.every=\d+ costs .*",
    r"rank \d is (slow: .* median is .* ms|as fast as the others again)",
)
EXPORT = (
    r"\S+ holds the weights of \S+, in Hugging Face's format",
    rf"transformers loads \S+; its scores differ from ours by at most {NUMBER}",
)


def train(folder: Path) -> list[str]:
    """Command of a short run of two ranks on text, which ends with an evaluation and a checkpoint."""
    (folder / "texts").mkdir()
    for number in range(8):
        (folder / "texts" / f"{number}.txt").write_text(f"def function_{number}(x):\n    return x + {number}\n" * 40)
    overrides = (
        f"run.dir={folder / 'run'} data.source=text data.path={folder / 'texts'} data.validation_fraction=0.2 "
        f"model.config.vocab_size=300 train.steps={STEPS} train.seq_len=16 train.eval_every={STEPS} parallel.tp=2 "
        f"optim.warmup_steps=2 checkpoint.every={STEPS} metrics.log_every=1 recovery.hang_timeout_s={patient_s(100)}"
    )
    return [*NXTRAIN, "launch", "configs/tiny_cpu.toml", "--nproc", "2", *overrides.split()]


def export(folder: Path) -> list[str]:
    return [*NXTRAIN, "convert", "nxtrain-to-hf", str(folder / "run"), str(folder / "huggingface"), "--verify"]


def sample(folder: Path) -> list[str]:
    return [*NXTRAIN, "generate", str(folder / "run"), "--prompt", "def ", "--max-new-tokens", "8", "--temperature=0"]


def assert_all_ours(lines: Sequence[str], ours: Sequence[str]) -> None:
    strange = [line for line in lines if not any(re.fullmatch(pattern, line) for pattern in ours)]
    assert strange == [], "\n".join(lines)


def shown(argv: Sequence[str]) -> Shown:
    result = on_terminal(argv, cwd=ROOT, columns=150)
    assert result.code == 0, result.raw
    return result


@pytest.fixture(scope="module")
def on_screen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Shown]:
    """A run on a terminal: its folder, and what it showed."""
    folder = tmp_path_factory.mktemp("screen")
    return folder, shown(train(folder))


def test_a_terminal_shows_a_run_in_lines_of_ours_and_one_line_of_progress(on_screen: tuple[Path, Shown]) -> None:
    _, screen = on_screen
    assert_all_ours(screen.lines, RUN)
    progress = [line for line in screen.lines if line.startswith("step ")]
    assert len(progress) == 1
    assert re.match(rf"step +{STEPS}/{STEPS} ", progress[0])


def test_the_line_of_progress_moves_through_the_launcher(on_screen: tuple[Path, Shown]) -> None:
    """Step and loss change in place, below the lines that are printed meanwhile."""
    _, screen = on_screen
    steps = []
    for state in screen.states:
        result = [match for line in state if (match := re.match(rf"step +(\d+)/{STEPS} .*\S", line))]
        assert len(result) <= 1, state
        steps += [int(match[1]) for match in result]
    assert steps == sorted(steps)
    assert len(set(steps)) > STEPS // 2
    assert steps[-1] == STEPS


def test_a_line_of_a_watching_thread_takes_the_place_of_the_bar() -> None:
    """On a terminal; a pipe gets the line alone."""
    code = (
        "import sys; from nxtrain.common.process.stacks import print_line; sys.stderr.write('step 1/9 of a bar'); "
        "sys.stderr.flush(); print_line('rank 1 is slow'); sys.stderr.write('step 2/9 of a bar')"
    )
    result = on_terminal([sys.executable, "-c", code], cwd=ROOT)
    assert result.lines == ["rank 1 is slow", "step 2/9 of a bar"]
    assert on_terminal([sys.executable, "-c", code], cwd=ROOT, environ={"TERM": "dumb"}).lines[0].endswith("is slow")
    piped = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, timeout=60, check=True)
    assert piped.stderr == b"step 1/9 of a barrank 1 is slow\nstep 2/9 of a bar"


def test_an_export_and_a_sample_show_lines_of_ours_on_a_terminal(on_screen: tuple[Path, Shown]) -> None:
    folder, _ = on_screen
    assert_all_ours(shown(export(folder)).lines, EXPORT)
    text = continued(folder / "run", "def ", 8, Sampling(temperature=0.0)) + "\n"
    screen = shown(sample(folder)).raw.replace("\r\n", "\n")
    assert screen.startswith(f"from {folder}/run/checkpoints/")  # named before its weights are read
    assert screen.endswith(f", step 40\n{text}")
    piped = subprocess.run(sample(folder), cwd=ROOT, capture_output=True, text=True, timeout=patient_s(60), check=True)
    assert piped.stdout == text
    assert re.fullmatch(rf"from {re.escape(str(folder))}/run/checkpoints/\S+, step 40\n", piped.stderr)
