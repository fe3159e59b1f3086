"""Addresses in S3 are sources of prepared corpora and of rows, and of nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.common.errors import ConfigError
from nxtrain.config.check import resolve_config
from nxtrain.config.load import load

PREPARED = ("data.source=arrow", "train.eval_every=0")
ROWS = ("data.source=tokens", "train.eval_every=0")


def checked(tmp_path: Path, *overrides: str) -> None:
    path = tmp_path / "run.toml"
    path.touch()
    resolve_config(load(path, overrides), 1)


def refused(tmp_path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        checked(tmp_path, *overrides)
    return str(error.value)


@pytest.mark.parametrize("key", ["data.path=s3://b/k", 'data.mixture=["s3://b/k", "x"]'])
def test_a_bucket_is_a_source_of_prepared_corpora_and_rows(tmp_path: Path, key: str) -> None:
    checked(tmp_path, *PREPARED, key)
    checked(tmp_path, *ROWS, key)
    assert "source=text reads files of this machine" in refused(tmp_path, "data.source=text", key)


def test_another_corpus_for_evaluation_may_be_in_a_bucket(tmp_path: Path) -> None:
    checked(tmp_path, "data.source=arrow", "data.path=x", "data.validation_path=s3://b/k")


@pytest.mark.parametrize("address", ["s3://", "s3://b", "s3://b/", "s3:///k"])
def test_an_address_without_an_object_is_refused(tmp_path: Path, address: str) -> None:
    assert "names no object" in refused(tmp_path, *PREPARED, f"data.path={address}")
