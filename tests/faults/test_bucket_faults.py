"""A corpus in S3 that fails or changes under a run: no batch of anything else, and no document lost or seen twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest

from nxtrain.common.errors import DataError, StorageError
from nxtrain.common.io import cached_object
from nxtrain.data.arrow import seal, streams, work
from nxtrain.launch.exit_codes import FINAL
from tests.support.commands import command, write_config
from tests.support.corpora import documents, prepare, write_corpus, write_tokenizer
from tests.support.object_stores import BUCKET, Fault, failing_s3, s3, s3_variables
from tests.support.runs import FILE, course

__all__ = ["s3", "s3_variables"]

STEPS, VOCABULARY, KEY = 12, 300, "c/o.arrow"
ADDRESS = f"s3://{BUCKET}/{KEY}"
SUMMED = (seal, work)
"""Modules that know the bytes of a checksum, each of which is of a block that a run reads as a whole."""


def in_small_blocks() -> None:
    """Let a run fetch few documents at a time, and none long before it needs them."""
    small = {
        (cached_object, "BLOCK_BYTES"): 256,
        (cached_object, "RUN_BLOCKS"): 2,
        (cached_object, "_RESERVE_BYTES"): 0,
    }
    small |= {(streams, "_PERMUTED"): 2, (streams, "_GROUP_BYTES"): 100}
    small |= {(module, "BLOCK_BYTES"): 256 for module in SUMMED}
    for (module, name), value in small.items():
        vars(module)[name] = value


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus on a disk beside its tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    write_tokenizer(folder / "tokenizer", VOCABULARY)
    source = write_corpus(folder / "src", "a.jsonl", documents(400))
    with ExitStack() as stack:
        for module in SUMMED:
            stack.enter_context(mock.patch.object(module, "BLOCK_BYTES", 256))
        prepare(source, out=folder / "o.arrow")
    return folder / "o.arrow"


def train(folder: Path, corpus: Path, path: str, variables: dict[str, str]) -> tuple[int, str]:
    """`nxtrain train` on the corpus at a path or an address."""
    if not (folder / FILE).exists():
        write_config(folder, steps=STEPS, every=2)
    data = {"source": "arrow", "path": path, "tokenizer": corpus.with_name("tokenizer"), "workers": 0}
    keys = [f"data.{key}={value}" for key, value in {**data, "cache_dir": folder / "cache"}.items()]
    keys += [f"model.config.vocab_size={VOCABULARY}", "checkpoint.async=false"]
    return command(folder, "train", folder / FILE, *keys, environ=variables, first=in_small_blocks)


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Records of the run on the disk."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, output = train(folder, corpus, str(corpus), {})
    assert code == 0, output
    return course(folder / "run")


def done(folder: Path) -> int:
    """Steps that a run has recorded so far."""
    path = folder / "run" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_ranges_that_break_off_are_requested_again_and_a_store_that_is_down_ends_the_run_which_goes_on(
    tmp_path: Path, corpus: Path, s3: Any, s3_variables: dict[str, str], undisturbed: list[dict[str, Any]]
) -> None:
    s3.upload_file(str(corpus), BUCKET, KEY)
    random, given = Random(0), list[Fault]()
    is_down = True

    def fault() -> Fault:
        fails = random.random() < 0.3 and "" in given[-2:]
        result: Fault = random.choice(("torn", "error")) if fails or (is_down and done(tmp_path) >= 5) else ""
        given.append(result)
        return result

    with failing_s3(s3_variables, fault) as variables:
        code, output = train(tmp_path, corpus, ADDRESS, variables)
        assert code == StorageError.exit_code, output
        assert code not in FINAL, "a launcher starts the run again"
        assert f"{ADDRESS}: " in " ".join(output.split())
        assert "Traceback" not in output
        broken = course(tmp_path / "run")
        assert broken == undisturbed[: len(broken)], "no batch of anything else"
        assert 5 <= len(broken) < STEPS
        is_down = False
        code, output = train(tmp_path, corpus, ADDRESS, variables)
        assert code == 0, output
    assert {"torn", "error"} < {*given[: len(given) // 2]} and {"torn", "error"} < {*given[len(given) // 2 :]}
    assert course(tmp_path / "run") == undisturbed


def deleted(s3: Any, corpus: Path) -> None:
    s3.delete_object(Bucket=BUCKET, Key=KEY)


def replaced(s3: Any, corpus: Path) -> None:
    s3.put_object(Bucket=BUCKET, Key=KEY, Body=corpus.read_bytes()[::-1])


@pytest.mark.parametrize(("change", "says"), [(deleted, "it is absent"), (replaced, "another version has taken")])
def test_an_object_that_changes_under_a_run_ends_it_and_the_object_as_it_was_goes_on(
    tmp_path: Path,
    corpus: Path,
    s3: Any,
    s3_variables: dict[str, str],
    undisturbed: list[dict[str, Any]],
    change: Callable[[Any, Path], None],
    says: str,
) -> None:
    s3.upload_file(str(corpus), BUCKET, KEY)
    changes = [change]

    def fault() -> Fault:
        if changes and done(tmp_path) >= 5:
            changes.pop()(s3, corpus)
        return ""

    with failing_s3(s3_variables, fault) as variables:
        code, output = train(tmp_path, corpus, ADDRESS, variables)
    assert code == DataError.exit_code, output
    flat = " ".join(output.split())
    assert f"{ADDRESS} has changed while it is read: {says}" in flat
    broken = course(tmp_path / "run")
    assert broken == undisturbed[: len(broken)], "no batch of anything else"
    assert 5 <= len(broken) < STEPS
    s3.upload_file(str(corpus), BUCKET, KEY)
    code, output = train(tmp_path, corpus, ADDRESS, s3_variables)
    assert code == 0, output
    assert course(tmp_path / "run") == undisturbed
