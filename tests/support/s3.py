"""S3 behind a real HTTP server on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from moto.server import ThreadedMotoServer

BUCKET = "mirror"


@pytest.fixture(scope="session")
def s3_variables() -> Iterator[dict[str, str]]:
    """What leads AWS's tools, in any process, to a server that runs."""
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
