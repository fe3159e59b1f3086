"""Whatever a person, a shell or a machine gives to a command ends in its result or in a message with an exit code."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE

from nxtrain.cli import main as cli
from nxtrain.common.errors import BackendError, ConfigError, StorageError
from nxtrain.config.load import values
from nxtrain.config.schema import RunConfig
from tests.support import ROOT
from tests.support import TINY as TINY_FILE
from tests.support.commands import outcome
from tests.support.processes import patient_s

TINY = str(TINY_FILE)
KEYS = [*values(RunConfig()), "model.config.rms_norm_eps", "model.config.num_attention_heads"]


def run(*argv: str) -> tuple[int, str]:
    """Exit code and standard error of a command in this process; any other end than that of a program is an error."""
    code, _, output = outcome(*argv)
    return code, output


# --- exceptions


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "runs/x/config.toml"), 5, "runs/x/config.toml: Permission"),
        (OSError(errno.EROFS, "Read-only file system", "a", None, "b"), 5, "a -> b: Read-only file system; check the"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a"), 5, "a: No such file or directory; check"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a"), 2, "a: File name too long; check the path"),
        (FileExistsError(errno.EEXIST, "File exists", "a"), 2, "a: File exists; check the path"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "a"), 2, "a: Not a directory; check the path"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "a"), 2, "a: Is a directory; check the path"),
        (OSError(errno.ELOOP, "Too many levels of symbolic links", "a"), 2, "a: Too many levels"),
        (OSError(errno.ENOSPC, "No space left on device", "a"), 4, "a: No space left on device; free space"),
        (
            OSError(errno.EFBIG, "File too large", "a"),
            4,
            "a: File too large; raise the limit on the size of files (ulimit",
        ),
        (OSError(errno.EIO, "Input/output error", "a"), 4, "a: Input/output error; start again when"),
        (OSError("odd"), 4, "the system: odd; start again"),
        (UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"), 2, "a text is not UTF-8"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), 2, "a text is not UTF-8"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 5, "torch cannot be imported: No module named"),
        (ImportError("libcudart.so.12: cannot open shared object file"), 5, "a library cannot be loaded: libcudart"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_the_system_and_other_packages_raise_is_one_message(
    monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, words: str
) -> None:
    monkeypatch.setattr(cli, "app", mock.Mock(side_effect=error))
    result, said = run("train")
    assert (result, said.count("error: "), "Traceback" in said) == (code, 1, False), said
    assert words in said
    assert code in {kind.exit_code for kind in (ConfigError, StorageError, BackendError)}


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("bug"),
        RecursionError("bug"),
        AssertionError("bug"),
        KeyError("bug"),
        ModuleNotFoundError("bug", name="nxtrain.nothing"),
        ImportError("bug", name="nxtrain_models.llama"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_defect_keeps_its_traceback_and_asks_for_a_report(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(cli, "app", mock.Mock(side_effect=error))
    code, said = run("train")
    assert code == 1
    assert said.startswith("Traceback")
    assert "bug" in said
    assert said.rstrip().endswith(cli.DEFECT)


def test_ranks_wait_for_the_one_that_names_a_problem_and_then_name_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun ends all ranks after the first that fails: a silent rank that is faster would hide the problem."""
    waits: list[float] = []
    monkeypatch.setattr("nxtrain.cli.main.time.sleep", waits.append)
    monkeypatch.setattr(cli, "_end", sys.exit)  # it would end this process
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for rank in range(3):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 3), ("LOCAL_WORLD_SIZE", 3)):
            monkeypatch.setenv(name, str(value))
        code, output = run("train", TINY, "parallel.tp=2")
        prefix = f"rank {rank}: " if rank else ""
        assert code == 2 and f"error: {prefix}parallel.tp (override)" in output
    assert waits == [cli.SPEAKER_S] * 2


def test_a_host_without_memory_is_no_defect_and_may_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "app", mock.Mock(side_effect=MemoryError("full")))
    code, said = run("train")
    assert (code, "MemoryError: full" in said, cli.DEFECT in said) == (1, True, False)


@pytest.mark.parametrize("argv", ["--help", "config show configs/demo.toml", "data inspect absent"])
def test_a_working_directory_that_is_gone_is_named(tmp_path: Path, argv: str) -> None:
    (tmp_path / "gone").mkdir()
    script = f"cd {tmp_path}/gone && rmdir {tmp_path}/gone && exec {sys.executable} -m nxtrain {argv}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == BackendError.exit_code
    assert done.stderr == "error: the working directory is gone: No such file or directory; change to another one\n"


DIGITS, DEPTH = "9" * 5000, "[" * 100_000


@pytest.mark.parametrize("text", [f'{{"vocab_size": {DIGITS}}}', f'{{"a": {DEPTH}'], ids=["digits", "depth"])
@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("config.json", ("config", "show", TINY, "model.hf={folder}")),
        ("config.json", ("convert", "hf-to-nxtrain", "{folder}", "{folder}/out")),
        ("config.json", ("generate", "{folder}", "--prompt", "x")),
        ("rows.jsonl", ("data", "prepare", "{folder}/rows.jsonl", "--out", "{folder}/o.arrow")),
        ("run.toml", ("config", "show", "{folder}/run.toml")),
        ("machines.toml", ("plan", TINY, "--hardware", "{folder}/machines.toml")),
    ],
)
def test_numbers_and_depths_beyond_a_parser_are_told_in_our_words(
    tmp_path: Path, name: str, argv: tuple[str, ...], text: str
) -> None:
    """Python's own words name functions that no user of a command can call."""
    (tmp_path / name).write_text(f"x = {text.replace(':', ' =')}" if name.endswith(".toml") else text)
    (tmp_path / "tokenizer.json").write_text(Tokenizer(BPE()).to_str())
    code, said = run(*(word.format(folder=tmp_path) for word in argv))
    assert code in {2, 3}, said
    assert "Traceback" not in said
    for words in ("set_int_max_str_digits", "recursion depth", "RecursionError", "ValueError", "Value error", "[Errno"):
        assert words not in said


@pytest.mark.parametrize(
    "argv",
    [
        ("launch", TINY, "--target", "moon"),
        ("data", "prepare", "a", "--out", "b", "--on-bad", "moon"),
        ("convert", "nxtrain-to-nxd", "a", "b", "--qkv", "moon"),
        ("bench", "pipeline", "--schedule", "moon"),
        ("plan", TINY, "--nodes", "moon"),
    ],
    ids=lambda argv: " ".join(argv[:2]),
)
def test_a_value_that_is_no_choice_is_told_without_words_of_python(argv: tuple[str, ...]) -> None:
    code, said = run(*argv)
    assert code == 2
    assert f"Invalid value for '{argv[-2]}': 'moon' is no" in " ".join(said.split())


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test session in the background ignores the signal
class Interrupt:
    def find_spec(self, name, *_):
        if name == "nxtrain.cli.data":
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from nxtrain.__main__ import main
main()
"""


def test_an_interrupt_while_a_command_is_imported_has_no_traceback() -> None:
    argv = [sys.executable, "-c", INTERRUPTED, "config", "keys"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=patient_s(60))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


ABSENT = "import sys; sys.modules[{name!r}] = None; from nxtrain.__main__ import main; main()"


@pytest.mark.parametrize(
    ("name", "argv"),
    [
        ("torch", ("train", TINY)),
        ("torch", ("generate", "runs/none", "--prompt", "x")),
        ("safetensors", ("convert", "hf-to-nxtrain", "none", "other")),
        ("tokenizers", ("generate", "runs/none", "--prompt", "x")),
        ("pyarrow", ("data", "prepare", "configs", "--out", "none.arrow")),
        ("pydantic", ("config", "show", TINY)),
        ("typer", ("--help",)),
        ("rich", ("--help",)),
    ],
)
def test_a_package_that_is_not_installed_is_named(tmp_path: Path, name: str, argv: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ABSENT.format(name=name), *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (BackendError.exit_code, False), done.stderr
    assert f"error: {name} cannot be imported" in done.stderr
    assert f"pip install '{name}" in " ".join(done.stderr.split())


@pytest.mark.parametrize("name", ["boto3", "botocore"])
def test_addresses_in_s3_without_boto3_name_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    for module in [result for result in sys.modules if result.partition(".")[0] in {"boto3", "botocore"}]:
        monkeypatch.delitem(sys.modules, module)  # what earlier tests have imported
    monkeypatch.setitem(sys.modules, name, None)
    for argv in (
        ("generate", "s3://bucket/run", "--prompt", "x"),
        ("convert", "nxtrain-to-hf", "s3://bucket/run", str(tmp_path / "out")),
        ("cache", "sync", "s3://bucket/cache", str(tmp_path / "cache")),
    ):
        code, said = run(*argv)
        assert (code, "Traceback" in said) == (BackendError.exit_code, False), said
        assert f"needs {name}, which is not installed: pip install 'nxtrain[s3]'" in said


# --- streams


def shell(command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    script = command.replace("nxtrain", f"{sys.executable} -m nxtrain", 1)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["bash", "-c", script],
        env={**env, **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full; runs on Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("argv", [f"config show {TINY}", f"config show {TINY} --json", f"launch {TINY} --dry-run"])
def test_standard_output_that_takes_nothing_is_an_error(argv: str, unbuffered: str) -> None:
    done = shell(f"nxtrain {argv} >/dev/full", PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == BackendError.exit_code
    assert done.stderr == "error: standard output cannot be written: No space left on device; send it elsewhere\n"


def test_streams_that_are_closed_stop_nothing_and_their_descriptors_are_taken() -> None:
    for closed in (">&-", "<&-", "<&- >&- 2>&-"):
        done = shell(f"nxtrain config show {TINY} {closed}")
        assert (done.returncode, done.stderr) == (0, ""), closed
    look = "from nxtrain.common.process.streams import open_standard_streams as o; "
    look += "import os, sys; o(); print('x', flush=True); "
    look += "os.write(2, str(os.open(os.devnull, os.O_RDONLY)).encode())"
    done = subprocess.run(
        ["bash", "-c", f'{sys.executable} -c "{look}" <&- >&-'], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "3")


def test_standard_error_that_takes_nothing_stops_nothing() -> None:
    assert shell(f"nxtrain launch {TINY} --dry-run 2>/dev/full").returncode == 0
    assert shell("nxtrain train nothing.toml 2>/dev/full").returncode == ConfigError.exit_code


@pytest.mark.parametrize("argv", [f"config show {TINY} run.name=\xe9", f"launch {TINY} run.name=\xe9 --dry-run"])
def test_a_terminal_of_few_characters_ends_no_command(argv: str) -> None:
    done = shell(f"nxtrain {argv}", PYTHONIOENCODING="ascii:strict", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\xe9" in done.stdout or "\\xe9" in done.stdout


# --- options, commands


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


def options() -> list[tuple[tuple[str, ...], Any]]:
    results = []
    for words, command in commands(typer.main.get_command(cli.app)):
        results += [(words, option) for option in command.params if option.opts[0].startswith("--")]
    return results


def test_no_number_of_an_option_is_too_large_for_what_takes_it() -> None:
    numbers = 0
    for words, option in options():
        if not re.search(r"\b(int|float)\b", str(option.type_descriptor.annotation)):
            continue
        numbers += 1
        for text in ("9" * 26, "-" + "9" * 26, "1e400", "nan"):
            code, said = run(*words, option.opts[0], text, *("x",) * 4)
            assert (code, "Traceback" in said) == (2, False), (words, option.opts, text, said)
            assert f"'{option.opts[0]}'" in said, (words, option.opts, text, said)
    assert numbers > 30


def test_help_offers_no_target_that_is_refused() -> None:
    (option,) = [option for words, option in options() if words == ("launch",) and option.opts == ["--target"]]
    targets = get_args(option.type_descriptor.annotation)
    assert len(targets) > 6
    for target in targets:
        overrides = ("backend.name=neuron", "cluster.instance=trn1.32xlarge", "compile.cache_dir=/var/tmp/x")
        code, said = run("launch", TINY, *overrides, "--nproc=1", "--target", target, "--dry-run")
        assert code == 0, (target, said)


def test_the_home_folder_is_expanded_in_paths_of_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run.toml").write_text("")
    assert run("config", "show", "~/run.toml") == (0, "")
    assert f"{tmp_path}/nothing" in run("generate", "~/nothing", "--prompt", "x")[1]
    assert f"cannot read {tmp_path}/hf/config.json" in run("convert", "hf-to-nxtrain", "~/hf", "~/out")[1]
    assert f"{tmp_path}/cache" in run("cache", "ls", "~/cache")[1]
    unknown = "no user of this machine is called nobody-of-this-name"
    assert unknown in run("generate", "~nobody-of-this-name/x", "--prompt", "x")[1]
    assert unknown in run("train", "~nobody-of-this-name/x")[1]


# --- anything at all

HOSTILE = """
true inf nan -1 0 1e400 1979-05-27 [] {} '' auto ~ ~x s3:// s3://b/c "\\u0000" / /dev/null "\\n" 1_0 -0.0 5e-324 1e308
9223372036854775807 2147483647 1048576 [1,2] [nan] [[1]] {rms_norm_eps=inf} {x={y=[1]}} none cpu bf16 zero1 hf
"""
LONG = ("0x" + "f" * 5000, "9" * 26, "9" * 5000, "[" * 900 + "]" * 900, "{a=" * 200 + "1" + "}" * 200, "x" * 5000)
WORDS = st.sampled_from((*HOSTILE.split(), *LONG, "\udcff"))
TEXTS = st.one_of(WORDS, st.text(max_size=8).filter(lambda text: "\0" not in text), st.integers().map(str))
NAMES = st.one_of(
    st.sampled_from(KEYS),
    st.sampled_from(KEYS),
    st.sampled_from(KEYS),
    st.sampled_from(
        ["", ".", "a..b", "run", "model.config", "model.config.", "extends", "a" * 5000, ".".join("a" * 2000)]
    ),
    st.text(max_size=6).filter(lambda text: "\0" not in text),
)
OVERRIDES = st.lists(st.builds("{}={}".format, NAMES, TEXTS), max_size=4)


def survives(*argv: str) -> None:
    code, said = run(*argv)
    assert code in {0, ConfigError.exit_code}, (argv, said)
    assert (code == 0) == (said == ""), (argv, said)
    assert "Traceback" not in said
    assert len(said) < 20_000, (argv, len(said))


@settings(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(overrides=OVERRIDES, command=st.sampled_from([("config", "show"), ("launch", "--dry-run"), ("config", "show")]))
def test_any_override_ends_in_a_result_or_in_a_message(overrides: list[str], command: tuple[str, ...]) -> None:
    survives(*command, TINY, "--", *overrides)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(
        st.one_of(st.builds("{} = {}".format, NAMES, TEXTS), st.sampled_from(["[run]", "[[x]]", "["])), max_size=5
    ),
    noise=st.one_of(st.just(b""), st.binary(max_size=6)),
)
def test_any_file_ends_in_a_result_or_in_a_message(tmp_path: Path, lines: list[str], noise: bytes) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape") + noise)
    survives("config", "show", str(file))
