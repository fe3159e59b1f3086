"""Build of the C++ collectives: a compiler that is absent or fails, and a folder that cannot be written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from nxtrain.backends.cpu_native import build


@pytest.fixture
def forget() -> Iterator[None]:
    """Load the library anew in the test, and again after it."""
    build.load.cache_clear()
    yield
    build.load.cache_clear()


def test_an_absent_compiler_is_named(forget: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(
        build.LibraryBuildError, match=r"no C\+\+ compiler is on PATH; Debian and Ubuntu: apt install g\+\+"
    ):
        build.load()


def test_a_compiler_that_fails_is_quoted(forget: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int f() { return unknown; }\n")
    monkeypatch.setattr(build, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(build.LibraryBuildError, match=r"failed: .*broken\.cpp:1.*unknown"):
        build.load()
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_folder_that_cannot_be_written_is_named(
    forget: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(build.LibraryBuildError, match="file"):
        build.load()
