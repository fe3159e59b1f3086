"""Google Cloud Storage and Azure Blob Storage behind real HTTP servers on this machine.

The server of Azure is Microsoft's own, azurite of npm. That of Google is a community's, which ignores the condition on
the version that a request names; `_conditional` answers these requests as Google documents it.
"""

from __future__ import annotations

import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.processes import free_port, patient_s
from tests.support.s3 import BUCKET

AZURITE = ROOT / "build" / "azurite" / "node_modules" / ".bin" / "azurite-blob"
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
