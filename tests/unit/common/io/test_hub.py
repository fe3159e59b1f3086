"""Repositories of the Hub: the real client and a server on this machine, which breaks off, refuses and is away."""

from __future__ import annotations

import threading
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest

from nxtrain.common.errors import ConfigError, StorageError
from nxtrain.common.io.hub import HubName, model_named
from tests.support.hub import TOKEN, Hub, hub, unwaiting

__all__ = ["hub", "unwaiting"]

NAME = HubName("acme/tiny")
LARGE = np.random.default_rng(0).bytes(300_001)
FILES = {"config.json": b"{}", "data/model.safetensors": LARGE, "README.md": b"words"}


def refused(name: HubName) -> str:
    """Words of the refusal to pin and fetch a repository; they name no function, and each has a way out."""
    with pytest.raises(ConfigError) as caught:
        pinned = name.pinned()
        pinned.fetch(pinned.sizes())
    (problem,) = caught.value.problems
    assert problem.hint
    return f"{problem}"


def failed(name: HubName) -> str:
    with pytest.raises(StorageError) as caught:
        pinned = name.pinned()
        pinned.fetch(pinned.sizes())
    assert str(name.repository) in str(caught.value)
    return str(caught.value)


# --- names


@pytest.mark.parametrize(
    ("text", "repository", "revision"),
    [
        ("acme/tiny", "acme/tiny", ""),
        ("hf://acme/tiny", "acme/tiny", ""),
        ("acme/tiny-1.5_b@v1.0", "acme/tiny-1.5_b", "v1.0"),
        ("hf://acme/tiny@refs/pr/1", "acme/tiny", "refs/pr/1"),
    ],
)
def test_a_text_names_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, repository: str, revision: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = model_named(text)
    assert result == HubName(repository, revision)
    assert model_named(f"hf://{result}") == result


@pytest.mark.parametrize(
    "text", ["", "tiny", "./acme/tiny", "../acme/tiny", "/acme/tiny", "a/b/c", "acme/", "runs/tiny"]
)
def test_a_path_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_named(text) is None


def test_a_folder_wins_and_a_misspelt_path_is_no_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme").mkdir()
    assert model_named("acme/tiny") is None  # perhaps acme/tint was meant
    assert model_named(f"acme/tiny@{'a' * 40}") == HubName("acme/tiny", "a" * 40)
    assert model_named("hf://acme/tiny") == NAME
    (tmp_path / "acme/tiny").mkdir()
    assert model_named("acme/tiny") is None
    assert model_named("hf://acme/tiny") == NAME


@pytest.mark.parametrize("text", ["hf://", "hf://tiny", "hf://acme/tiny/config.json", "hf://acme/tiny@", "hf:///a/b"])
def test_an_address_without_a_repository_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no repository"):
        model_named(text)


# --- commits and files


def test_each_revision_is_pinned_to_its_commit(hub: Hub) -> None:
    first = hub.add("acme/tiny", {"config.json": b"1"})
    hub.repositories["models/acme/tiny"].revisions["refs/pr/1"] = first
    second = hub.add("acme/tiny", {"config.json": b"2"})
    assert NAME.pinned() == HubName("acme/tiny", second)
    assert HubName("acme/tiny", "main").pinned().revision == second
    assert HubName("acme/tiny", "refs/pr/1").pinned().revision == first
    asked = len(hub.requests)
    assert HubName("acme/tiny", first).pinned().revision == first
    assert len(hub.requests) == asked


def test_files_are_fetched_once_and_only_those_that_are_wanted(hub: Hub) -> None:
    hub.add("acme/tiny", FILES)
    said: list[str] = []
    name = NAME.pinned()
    sizes = name.sizes()
    assert sizes == {file: len(content) for file, content in FILES.items()}
    folder = name.fetch({"config.json": 2}, said.append)
    assert hub.fetched() == ["config.json"]
    name.fetch({file: sizes[file] for file in ("config.json", "data/model.safetensors")}, said.append)
    assert hub.fetched() == ["config.json", "model.safetensors"]
    assert (folder / "data/model.safetensors").read_bytes() == LARGE
    assert said[1].startswith(f"fetches data/model.safetensors of {name}, 292.97 KiB, into ")
    asked = len(hub.requests)
    assert name.fetch({file: sizes[file] for file in ("config.json", "data/model.safetensors")}) == folder
    assert len(hub.requests) == asked


def test_models_and_data_sets_of_one_name_are_two(hub: Hub) -> None:
    hub.add("acme/tiny", {"a": b"model"})
    hub.add("acme/tiny", {"a": b"data"}, kind="datasets")
    data = HubName("acme/tiny", kind="dataset").pinned()
    assert (data.fetch({"a": 4}) / "a").read_bytes() == b"data"
    assert (NAME.pinned().fetch({"a": 5}) / "a").read_bytes() == b"model"


def test_processes_of_a_machine_share_one_download(hub: Hub) -> None:
    hub.add("acme/tiny", FILES)
    name = NAME.pinned()
    threads = [threading.Thread(target=name.fetch, args=(name.sizes(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for words in ("GET /files/", "HEAD "):
        assert len([request for request in hub.requests if request.startswith(words)]) == len(FILES)


# --- faults


def test_a_file_that_breaks_off_goes_on_where_it_broke(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, unwaiting: None
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    hub.add("acme/tiny", FILES)
    hub.torn["data/model.safetensors"] = 2
    name = NAME.pinned()
    if huggingface_hub.__version__.startswith("0."):  # requests reports each break, and a new start goes on
        for _ in range(2):
            assert "start again" in failed(name)
    assert (name.fetch(name.sizes()) / "data/model.safetensors").read_bytes() == LARGE
    assert hub.ranges == ["data/model.safetensors"] * 2


def test_a_file_that_never_comes_whole_is_missing_until_it_does(hub: Hub, unwaiting: None) -> None:
    hub.add("acme/tiny", FILES)
    hub.torn["data/model.safetensors"] = 1000
    assert "start again" in failed(NAME)
    name = NAME.pinned()
    assert not (name.folder / "data/model.safetensors").exists()
    hub.torn.clear()
    assert (name.fetch(name.sizes()) / "data/model.safetensors").read_bytes() == LARGE


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_is_out_of_order_may_answer_later(hub: Hub, unwaiting: None, status: int) -> None:
    hub.add("acme/tiny", FILES)
    hub.status = status
    assert "HF_HUB_OFFLINE=1" in failed(NAME)


def test_a_hub_that_is_away_may_answer_later(hub: Hub, monkeypatch: pytest.MonkeyPatch, unwaiting: None) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    said = failed(NAME)
    assert "acme/tiny from http://127.0.0.1:9: Connection refused; start again when it answers" in said


@pytest.mark.parametrize("number", [-2, 101, 104, 111])
def test_a_failed_connection_has_words_and_no_number(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, unwaiting: None, number: int
) -> None:
    from huggingface_hub import HfApi

    def fails(*words: object, **settings: object) -> None:
        raise ConnectionError(number, "the words of the system")

    monkeypatch.setattr(HfApi, "repo_info", fails)
    said = failed(NAME)
    assert f"from {hub.endpoint}: the words of the system; start again" in said and "Errno" not in said


def test_objects_of_http_packages_are_in_no_message(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface-hub before 1 uses requests, whose message has the name and the address of a connection object."""
    requests = pytest.importorskip("requests")
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *words, **more: requests.get("http://127.0.0.1:9"))
    said = failed(NAME)
    assert f"from {hub.endpoint}: Connection refused; start again" in said


def test_a_repository_or_revision_that_does_not_exist_is_named(hub: Hub) -> None:
    assert "the Hub has no model acme/tiny, or it is private" in refused(NAME)
    assert "has no dataset acme/tiny" in refused(HubName("acme/tiny", kind="dataset"))
    hub.add("acme/tiny", FILES)
    assert "acme/tiny has no revision v2" in refused(HubName("acme/tiny", "v2"))
    assert "acme/tiny has no revision" in refused(HubName("acme/tiny", "0" * 40))


def test_a_gated_repository_asks_for_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("acme/tiny", FILES, gated=True)
    said = refused(NAME)
    assert "acme/tiny is gated" in said and f"ask for access at {hub.endpoint}/acme/tiny" in said and "HF_TOKEN" in said
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    name = NAME.pinned()
    assert (name.fetch(name.sizes()) / "data/model.safetensors").read_bytes() == LARGE


@pytest.mark.parametrize("status", [401, 403])
def test_a_token_that_is_refused_is_no_fault_of_the_network(hub: Hub, status: int) -> None:
    sha = hub.add("acme/tiny", FILES)
    hub.status = status
    said = refused(HubName("acme/tiny", sha))
    assert "log in: hf auth login" in said


def test_files_that_the_disk_cannot_hold_are_not_begun(hub: Hub) -> None:
    hub.add("acme/tiny", FILES)
    hub.sizes["data/model.safetensors"] = 1 << 60
    assert "needs 1048576.00 TiB, and the disk of" in failed(NAME)
    assert hub.fetched() == []


@pytest.mark.parametrize(("number", "way_out"), [(28, "free space"), (122, "free space"), (27, "ulimit -f")])
def test_a_disk_that_fills_up_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch, number: int, way_out: str) -> None:
    hub.add("acme/tiny", FILES)
    name = NAME.pinned()
    sizes = name.sizes()

    def full(*words: object, **settings: object) -> None:
        raise OSError(number, "no room")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", full)
    with pytest.raises(StorageError, match=r"a file cannot be written while acme/tiny@.* downloads.*HF_HOME") as failed:
        name.fetch(sizes)
    assert way_out in str(failed.value)


# --- without network


def test_without_network_the_cache_serves_what_it_has(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    sha = hub.add("acme/tiny", FILES)
    name = NAME.pinned()
    name.fetch({"config.json": 2})
    asked = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert NAME.pinned() == HubName("acme/tiny", sha)
    assert NAME.pinned().sizes() == {"config.json": 2}
    assert NAME.pinned().fetch({"config.json": 2}) == name.folder
    with pytest.raises(ConfigError, match=r"lacks README\.md, and HF_HUB_OFFLINE is set") as caught:
        name.fetch({"config.json": 2, "README.md": 5})
    assert f"hf download acme/tiny --revision {sha}" in str(caught.value)
    with pytest.raises(ConfigError, match="has no revision v2, and HF_HUB_OFFLINE is set"):
        HubName("acme/tiny", "v2").pinned()
    assert len(hub.requests) == asked
