"""Client of Azure Blob Storage, based on azure-storage-blob."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from nxtrain.common.errors import BackendError, CheckpointError
from nxtrain.common.io.bucket import BucketService, Cause, Stat, VerifiedStream, receive
from nxtrain.common.io.checksummed_file import FileDigest, transferred

_PART_BYTES = 16 << 20
"""Bytes of each block of an upload, held in memory. The service allows 50,000 blocks per object."""
_RECEIVED_BYTES = 4 << 20
"""Bytes of one response of a download. Progress is counted after each response."""
_DELETE = 256
"""Maximum number of names in one delete request, a limit of the service."""
# HTTP statuses: lowest of server errors, too many requests, request timeout.
_FAILURE = 500
_TOO_MANY = 429
_TIMEOUT = 408

_ACCEPTED, _ABSENT = 202, 404
"""HTTP status of a deleted object; of an object that is not there."""


class BlobStorage(BucketService):
    """A container of Azure Blob Storage, configured by the environment variables of the `az storage` command.

    The variables are AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY or
    AZURE_STORAGE_SAS_TOKEN. With the account alone, azure-identity finds a login or the machine's identity.
    """

    extra = "azure"
    _container: Any

    def vendor_errors(self) -> tuple[type[Exception], ...]:
        from azure.core.exceptions import AzureError

        import_module("azure.storage.blob")
        return (AzureError,)

    def open(self, address: str) -> None:
        from azure.storage.blob import ContainerClient

        sizes = {
            "max_block_size": _PART_BYTES,
            "max_single_put_size": _PART_BYTES,
            "max_single_get_size": _RECEIVED_BYTES,
            "max_chunk_get_size": _RECEIVED_BYTES,
        }
        text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING")
        if text:
            try:
                self._container = ContainerClient.from_connection_string(text, self.bucket, **sizes)
            except ValueError as error:
                raise BackendError(f"{address}: AZURE_STORAGE_CONNECTION_STRING cannot be read: {error}") from error
            return
        account = os.environ.get("AZURE_STORAGE_ACCOUNT")
        if not account:
            way_out = "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT with a key or a login"
            raise BackendError(f"{address}: no storage account is given; {way_out}")
        credential: Any = os.environ.get("AZURE_STORAGE_KEY") or os.environ.get("AZURE_STORAGE_SAS_TOKEN")
        if not credential:
            from azure.identity import DefaultAzureCredential

            credential = DefaultAzureCredential()  # login or machine's identity of this process
        self._container = ContainerClient(
            f"https://{account}.blob.core.windows.net", self.bucket, credential=credential, **sizes
        )

    def cause(self, error: Any) -> Cause:
        from azure.core.exceptions import (
            ClientAuthenticationError,
            HttpResponseError,
            ResourceModifiedError,
            ResourceNotFoundError,
        )

        if isinstance(error, ResourceNotFoundError):
            # Requests that bring no body back, as for properties, have a status alone.
            no_container = getattr(error, "error_code", "") == "ContainerNotFound"
            return "refused" if no_container else "absent"
        if isinstance(error, ResourceModifiedError):
            return "replaced"
        if isinstance(error, ClientAuthenticationError):
            return "refused"
        if isinstance(error, HttpResponseError) and (error.status_code or _FAILURE) < _FAILURE:
            return "passing" if error.status_code in (_TOO_MANY, _TIMEOUT) else "refused"
        return "passing"  # the network, an answer that broke off, or a server error

    def stat(self, key: str) -> Stat:
        properties = self._container.get_blob_client(key).get_blob_properties()
        return Stat(int(properties.size), str(properties.etag))

    def read(self, key: str) -> bytes:
        return bytes(self._container.download_blob(key).readall())

    def read_range(self, key: str, tag: str, view: memoryview, start: int) -> int:
        from azure.core import MatchConditions

        condition = MatchConditions.IfNotModified
        answer = self._container.download_blob(key, start, len(view), etag=tag, match_condition=condition)
        return receive(answer.chunks(), view)

    def sizes(self, prefix: str) -> dict[str, int]:
        return {blob.name: int(blob.size) for blob in self._container.list_blobs(name_starts_with=prefix)}

    def put(self, key: str, content: bytes) -> None:
        self._container.upload_blob(key, content, overwrite=True, validate_content=True)

    def upload(self, key: str, content: VerifiedStream, stored: FileDigest) -> None:
        self._container.upload_blob(key, content, length=stored.num_bytes, overwrite=True, validate_content=True)

    def download(self, key: str, target: Path) -> None:
        answer = self._container.download_blob(key)
        with target.open("wb") as file:
            for piece in answer.chunks():
                file.write(piece)
                transferred.note(len(piece))

    def delete(self, keys: list[str]) -> None:
        for first in range(0, len(keys), _DELETE):
            names = keys[first : first + _DELETE]
            answers = self._container.delete_blobs(*names, raise_on_any_failure=False)
            for key, answer in zip(names, answers, strict=True):
                if answer.status_code not in (_ACCEPTED, _ABSENT):
                    raise CheckpointError(f"az://{self.bucket}: cannot delete {key}: {answer.reason}")
