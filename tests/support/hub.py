"""A Hub of Hugging Face on this machine, for the real client: repositories, commits, and answers that break off.

The protocol is that of https://huggingface.co/docs/hub/api, as far as downloads go: information on a revision, its
tree, and files with their etag, commit and length, large ones after a redirect to another host.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

TOKEN = "hf_of_the_tests"

_LARGE = 1000
"""Bytes from which a file is kept in large file storage."""


@dataclass
class Repository:
    """Commits of a repository: files by commit, and commits by branch and tag."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    is_gated: bool = False

    def commit(self, files: Mapping[str, bytes], revision: str = "main") -> str:
        """Commit files; returns the commit's name."""
        name = hashlib.sha1(repr((sorted(files.items()), len(self.commits))).encode()).hexdigest()
        self.commits[name] = dict(files)
        self.revisions[revision] = name
        return name


class Hub:
    """Server with repositories by `models/org/name` and `datasets/org/name`.

    Attributes:
        requests: Method and path of all requests.
        ranges: Paths of requests for the rest of a file.
        torn: Number of times that a file, by path, breaks off in its middle.
        status: Status of all answers; 0: as they should be.
        sizes: Bytes that the tree claims of a file, by path, in place of its own.
        moves: Commits that the next questions for a branch get, one each; then that of the branch.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.ranges: list[str] = []
        self.torn: Counter[str] = Counter()
        self.status = 0
        self.sizes: dict[str, int] = {}
        self.moves: list[str] = []
        self.endpoint = ""

    def add(self, name: str, files: Mapping[str, bytes], *, kind: str = "models", gated: bool = False) -> str:
        """Add a repository with one commit, or a commit to one; returns the commit."""
        repository = self.repositories.setdefault(f"{kind}/{name}", Repository())
        repository.is_gated = gated
        return repository.commit(files)

    def add_folder(self, name: str, folder: Path) -> str:
        """Add a model with the files of a folder."""
        return self.add(name, {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()})

    def variables(self, home: Path) -> dict[str, str]:
        """Environment variables that point the client, in any process, to this server."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}

    def fetched(self) -> list[str]:
        """Names of the files whose content was sent, without repetitions."""
        names = [path.rpartition("/")[2] for path in self.requests if path.startswith("GET") and "/files/" in path]
        return list(dict.fromkeys(names))


@contextmanager
def serving() -> Iterator[Hub]:
    """A server, until the end of this context."""
    hub = Hub()

    class Answers(_Answers):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server, to which the client of this process and of those that it starts turns; its cache is empty."""
    from huggingface_hub import constants, file_download

    with serving() as hub:
        home = tmp_path / "of-the-hub"
        for name, value in hub.variables(home).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", _template(hub.endpoint))
        if hasattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE"):  # a copy, before huggingface-hub 1
            monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", _template(hub.endpoint))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub


@pytest.fixture
def unwaiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries of the client without their pauses."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def _template(endpoint: str) -> str:
    return f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Hub

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *words: object) -> None:
        """Nothing."""

    def _answer(self) -> None:
        hub = self.served
        address = urlsplit(self.path)
        path = unquote(address.path)
        hub.requests.append(f"{self.command} {path}")
        if hub.status:
            return self._refuse(hub.status, "")
        stored = re.fullmatch(r"/files/(\w+)/(.+)", path)
        if stored:
            return self._send_stored(stored[1], stored[2])
        api = re.fullmatch(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)/?)?", address.path)
        if api:
            revision = unquote(api[4] or "main")
            return self._send_json(f"{api[1]}/{api[2]}", revision, api[3] or "revision")
        resolve = re.fullmatch(r"(/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", address.path)
        if resolve:
            kind = "models"
            if resolve[1]:
                kind = "datasets"
            return self._send_file(f"{kind}/{resolve[2]}", unquote(resolve[3]), unquote(resolve[4]))
        return self._refuse(404, "EntryNotFound")

    def _find(self, name: str, revision: str) -> tuple[Repository, str] | None:
        """The repository and the commit of a request; None: it was answered by a refusal."""
        repository = self.served.repositories.get(name)
        if repository is None:
            self._refuse(401, "RepoNotFound")  # as of a private one
            return None
        commit = repository.revisions.get(revision, revision)
        if commit != revision and self.served.moves:
            commit = self.served.moves.pop(0)
        if commit not in repository.commits:
            self._refuse(404, "RevisionNotFound")
            return None
        return repository, commit

    def _send_json(self, name: str, revision: str, what: str) -> None:
        result = self._find(name, revision)
        if result is None:
            return
        repository, commit = result
        files = repository.commits[commit]
        sizes = {file: self.served.sizes.get(file, len(content)) for file, content in files.items()}
        if what == "tree":
            tree = [{"type": "file", "path": file, "size": size, "oid": commit} for file, size in sizes.items()]
            return self._send(json.dumps(tree).encode())
        siblings = [{"rfilename": file} for file in files]
        if "blobs=" in self.path:
            siblings = [{"rfilename": file, "size": size} for file, size in sizes.items()]  # type: ignore[dict-item]
        about: dict[str, Any] = {"id": name.partition("/")[2], "sha": commit, "siblings": siblings}
        self._send(json.dumps({**about, "private": False, "gated": repository.is_gated, "tags": []}).encode())

    def _send_file(self, name: str, revision: str, file: str) -> None:
        result = self._find(name, revision)
        if result is None:
            return
        repository, commit = result
        if repository.is_gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(401, "GatedRepo")
        content = repository.commits[commit].get(file)
        if content is None:
            return self._refuse(404, "EntryNotFound")
        etag = hashlib.sha256(content).hexdigest()
        headers = {"X-Repo-Commit": commit, "X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{etag}"'}
        other_host = self.served.endpoint.replace("127.0.0.1", "localhost")
        headers["Location"] = f"{other_host}/files/{commit}/{file}"
        if len(content) < _LARGE and self.command == "HEAD":
            return self._send(content, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'})
        self._send(b"", headers, status=302)

    def _send_stored(self, commit: str, file: str) -> None:
        """Send a file, or the rest of one, or the beginning of it."""
        hub = self.served
        content = next(
            repository.commits[commit][file] for repository in hub.repositories.values() if commit in repository.commits
        )
        status, headers = 200, {"Accept-Ranges": "bytes"}
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if begin:
            hub.ranges.append(file)
            start = int(begin[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            status, content = 206, content[start:]
        if not hub.torn[file]:
            return self._send(content, headers, status)
        hub.torn[file] -= 1
        self._send(content[: len(content) // 2], {**headers, "Content-Length": str(len(content))}, status)
        self.close_connection = True

    def _send(self, content: bytes, headers: Mapping[str, str] | None = None, status: int = 200) -> None:
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        headers = {"X-Error-Message": code or "out of order"}
        if code:
            headers["X-Error-Code"] = code
        self._send(b"", headers, status)
