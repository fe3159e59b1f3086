"""S3, Google Cloud Storage and Azure Blob Storage behind real HTTP servers on this machine.

The server of Azure is Microsoft's own, azurite of npm. That of Google is a community's, which ignores the condition on
the version that a request names; `_conditional` answers these requests as Google documents it.
"""

from __future__ import annotations

import http.client
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from moto.server import ThreadedMotoServer

from nxtrain.common.io.bucket import BucketPath
from tests.support import ROOT
from tests.support.processes import free_port, patient_s

BUCKET = "mirror"


@pytest.fixture(scope="session")
def s3_variables() -> Iterator[dict[str, str]]:
    """Environment variables that point AWS's tools, in any process, to a running server."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }
    server.stop()


@pytest.fixture
def s3(s3_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client of the server, and one empty bucket."""
    import boto3

    for name, value in s3_variables.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    yield client
    drop_bucket(client)
    client.close()


def object_of(address: BucketPath) -> dict[str, str]:
    """Bucket and key of an address, as arguments of requests."""
    return {"Bucket": address.bucket, "Key": address.key}


def drop_bucket(client: Any) -> None:
    """Delete the bucket with all that it holds, if it is there."""
    if BUCKET in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
        for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
            client.delete_object(Bucket=BUCKET, Key=item["Key"])
        client.delete_bucket(Bucket=BUCKET)


Deliver = Callable[[BaseHTTPRequestHandler, http.client.HTTPResponse, bytes], None]
"""Function that sends the server's answer and its content, or a part of them."""


@contextmanager
def _between(variables: dict[str, str], deliver: Deliver) -> Iterator[dict[str, str]]:
    """The same server behind one that delivers its answers in another way: what leads AWS's tools there."""

    class Between(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            server = http.client.HTTPConnection(urlsplit(variables["AWS_ENDPOINT_URL"]).netloc)
            server.request(self.command, self.path, body, dict(self.headers))
            answer = server.getresponse()
            deliver(self, answer, answer.read())

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward  # noqa: N815  # as http.server finds them

        def log_message(self, *words: object) -> None:
            """Nothing."""

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:  # whoever asked is gone
                time.sleep(0)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Between)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield {**variables, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}"}
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _send_head(request: BaseHTTPRequestHandler, answer: http.client.HTTPResponse) -> None:
    request.send_response_only(answer.status)
    for name, value in answer.getheaders():
        if name.lower() not in {"transfer-encoding", "connection"}:
            request.send_header(name, value)
    request.end_headers()


@contextmanager
def slow_s3(variables: dict[str, str], seconds: float, number: int, pieces: int = 40) -> Iterator[dict[str, str]]:
    """The same server behind one that gives large answers in pieces: what leads AWS's tools there."""
    ended, left, lock = threading.Event(), [number], threading.Lock()

    def deliver(request: BaseHTTPRequestHandler, answer: http.client.HTTPResponse, content: bytes) -> None:
        _send_head(request, answer)
        with lock:
            is_slow = len(content) > 100_000 and left[0] > 0
            left[0] -= is_slow
        size = -(-len(content) // pieces) if is_slow else max(1, len(content))
        for start in range(0, len(content), size):
            if is_slow and ((not seconds and 2 * start > len(content)) or ended.wait(seconds / pieces)):
                ended.wait(120)
                return
            request.wfile.write(content[start : start + size])

    with _between(variables, deliver) as result:
        try:
            yield result
        finally:
            ended.set()


Fault = Literal["", "torn", "error"]
"""Answer to a request for a range: as it is, broken off in its middle, or the server's failure."""


@contextmanager
def failing_s3(variables: dict[str, str], fault: Callable[[], Fault]) -> Iterator[dict[str, str]]:
    """The same server behind one that fails at requests for ranges: what leads AWS's tools there."""
    lock = threading.Lock()

    def deliver(request: BaseHTTPRequestHandler, answer: http.client.HTTPResponse, content: bytes) -> None:
        result: Fault = ""
        if request.command == "GET" and request.headers.get("Range"):
            with lock:
                result = fault()
        if result == "error":
            request.send_response_only(503)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        _send_head(request, answer)
        if request.command != "HEAD":
            request.wfile.write(content[: len(content) // 2] if result else content)
        request.close_connection = request.close_connection or bool(result)

    with _between(variables, deliver) as result:
        yield result


AZURITE = ROOT / "build" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
# A program of npm, which pip cannot install; `.ci/run` installs it where npm can be reached.
needs_azurite = pytest.mark.skipif(
    not AZURITE.exists() or shutil.which("node") is None,
    reason="no azurite, which continuous integration installs: bash scripts/install_azurite.sh",
)
# Name and key of azurite's account, which its documentation publishes.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="session")
def gcs_variables() -> Iterator[dict[str, str]]:
    """Environment variables that point Google's client, in any process, to a running server."""
    from gcp_storage_emulator.handlers import objects

    # The server's table of requests takes the function when the module is imported.
    objects.download = partial(_conditional, objects.download)
    from gcp_storage_emulator.server import create_server

    port = free_port()
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    server.start()
    yield {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}
    server.stop()


def _conditional(download: Any, request: Any, response: Any, storage: Any, *rest: Any) -> Any:
    from gcp_storage_emulator.exceptions import NotFound

    wanted = request.query.get("ifGenerationMatch")
    if wanted:
        with suppress(NotFound):
            there = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])["generation"]
            if there != wanted[0]:
                response.status = HTTPStatus.PRECONDITION_FAILED
                return None
    return download(request, response, storage, *rest)


@pytest.fixture
def gcs(gcs_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty bucket of the server."""
    from google.cloud import storage

    for name, value in gcs_variables.items():
        monkeypatch.setenv(name, value)
    bucket = storage.Client(project=None).bucket(BUCKET)
    yield bucket
    bucket.delete_blobs(list(bucket.list_blobs()))


@pytest.fixture(scope="session")
def azure_variables() -> Iterator[dict[str, str]]:
    """Environment variables that point Azure's client, in any process, to a running server."""
    port = free_port()
    options = ["--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry"]
    server = subprocess.Popen([AZURITE, "--blobPort", str(port), *options], stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    deadline = time.monotonic() + patient_s(60)
    while True:
        try:
            urllib.request.urlopen(address, timeout=5)
        except urllib.error.HTTPError:
            break  # it asks for a key
        except OSError:
            assert time.monotonic() < deadline and server.poll() is None, "azurite does not start"
            time.sleep(0.05)
    parts = {
        "DefaultEndpointsProtocol": "http",
        "AccountName": _ACCOUNT,
        "AccountKey": _KEY,
        "BlobEndpoint": address,
    }
    yield {"AZURE_STORAGE_CONNECTION_STRING": ";".join(f"{name}={value}" for name, value in parts.items())}
    server.terminate()
    server.wait()


@pytest.fixture
def azure(azure_variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty container of the server."""
    from azure.storage.blob import ContainerClient

    for name, value in azure_variables.items():
        monkeypatch.setenv(name, value)
    container = ContainerClient.from_connection_string(azure_variables["AZURE_STORAGE_CONNECTION_STRING"], BUCKET)
    container.create_container()
    yield container
    container.delete_container()
