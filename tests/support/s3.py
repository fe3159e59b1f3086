"""S3 behind a real HTTP server on this machine."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from moto.server import ThreadedMotoServer

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


def drop_bucket(client: Any) -> None:
    """Delete the bucket with all that it holds, if it is there."""
    if BUCKET in {bucket["Name"] for bucket in client.list_buckets()["Buckets"]}:
        for item in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
            client.delete_object(Bucket=BUCKET, Key=item["Key"])
        client.delete_bucket(Bucket=BUCKET)


@contextmanager
def slow_s3(variables: dict[str, str], seconds: float, number: int, pieces: int = 40) -> Iterator[dict[str, str]]:
    """The same server behind one that gives large answers in pieces: what leads AWS's tools there.

    Args:
        variables: Lead to the server itself.
        seconds: That a large answer takes; 0: its first half comes, and nothing more.
        number: So many of them are slow, the first.
        pieces: Of each.
    """
    ended, left, lock = threading.Event(), [number], threading.Lock()

    class Between(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            server = http.client.HTTPConnection(urlsplit(variables["AWS_ENDPOINT_URL"]).netloc)
            server.request(self.command, self.path, body, dict(self.headers))
            answer = server.getresponse()
            content = answer.read()
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in {"transfer-encoding", "connection"}:
                    self.send_header(name, value)
            self.end_headers()
            with lock:
                is_slow = len(content) > 100_000 and left[0] > 0
                left[0] -= is_slow
            size = -(-len(content) // pieces) if is_slow else max(1, len(content))
            for start in range(0, len(content), size):
                if is_slow and ((not seconds and 2 * start > len(content)) or ended.wait(seconds / pieces)):
                    ended.wait(120)
                    return
                self.wfile.write(content[start : start + size])

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
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
