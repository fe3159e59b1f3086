"""Client of Google Cloud Storage, based on google-cloud-storage."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from nxtrain.common.io.bucket import BucketService, Cause, Stat, VerifiedStream
from nxtrain.common.io.checksummed_file import FileDigest, transferred

_PART_BYTES = 16 << 20
"""Bytes of each part of an upload, held in memory. The service requires a multiple of 256 KiB."""
# HTTP statuses: lowest of server errors, too many requests, request timeout.
_FAILURE = 500
_TOO_MANY = 429
_TIMEOUT = 408


class CloudStorage(BucketService):
    """A bucket of Google Cloud Storage, accessed with the application default credentials.

    The credentials come from `gcloud auth application-default login` or GOOGLE_APPLICATION_CREDENTIALS. Machines of
    Google Cloud have credentials of their own.
    """

    extra = "gcs"
    _client: Any
    _bucket: Any

    def vendor_errors(self) -> tuple[type[Exception], ...]:
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.storage.exceptions import DataCorruption, InvalidResponse
        from requests import RequestException

        return GoogleAPIError, GoogleAuthError, DataCorruption, InvalidResponse, RequestException

    def open(self, address: str) -> None:
        from google.cloud import storage

        # Requests for objects need no project.
        self._client = storage.Client(project=None)
        self._bucket = self._client.bucket(self.bucket)

    def cause(self, error: Any) -> Cause:
        from google.api_core.exceptions import GoogleAPICallError, NotFound, PreconditionFailed
        from google.auth.exceptions import GoogleAuthError, TransportError

        if isinstance(error, NotFound):
            return "absent"
        if isinstance(error, PreconditionFailed):
            return "replaced"
        if isinstance(error, GoogleAuthError) and not isinstance(error, TransportError):
            return "refused"
        if isinstance(error, GoogleAPICallError) and (error.code or 0) < _FAILURE:
            return "passing" if error.code in (_TOO_MANY, _TIMEOUT) else "refused"
        return "passing"  # an answer that broke off or has another checksum, the network, or a server error

    def stat(self, key: str) -> Stat:
        blob = self._bucket.blob(key)
        blob.reload()
        return Stat(int(blob.size), str(blob.generation))

    def read(self, key: str) -> bytes:
        return bytes(self._bucket.blob(key).download_as_bytes(raw_download=True))

    def read_range(self, key: str, tag: str, view: memoryview, start: int) -> int:
        received = _ViewFile(view)
        # The service has no checksum of a range.
        self._bucket.blob(key).download_to_file(
            received,
            start=start,
            end=start + len(view) - 1,
            if_generation_match=int(tag),
            raw_download=True,
            checksum=None,
        )
        return received.tell()

    def sizes(self, prefix: str) -> dict[str, int]:
        return {blob.name: int(blob.size) for blob in self._client.list_blobs(self.bucket, prefix=prefix)}

    def put(self, key: str, content: bytes) -> None:
        self._bucket.blob(key).upload_from_string(content, checksum="crc32c")

    def upload(self, key: str, content: VerifiedStream, stored: FileDigest) -> None:
        blob = self._bucket.blob(key, chunk_size=_PART_BYTES)
        blob.upload_from_file(content, size=stored.num_bytes, checksum="crc32c")

    def download(self, key: str, target: Path) -> None:
        with _CountedFile(target, "wb") as file:
            self._bucket.blob(key).download_to_file(file, raw_download=True)

    def delete(self, keys: list[str]) -> None:
        self._bucket.delete_blobs([self._bucket.blob(key) for key in keys], on_error=lambda blob: None)


class _ViewFile(io.RawIOBase):
    """File object that writes into a memory view, and counts its bytes as progress."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._position = view, 0

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        assert whence == io.SEEK_SET, "the client begins again at 0"
        self._position = offset
        return offset

    def write(self, content: Any) -> int:
        self._view[self._position : self._position + len(content)] = content
        self._position += len(content)
        transferred.note(len(content))
        return len(content)


class _CountedFile(io.FileIO):
    """File on a disk that counts its written bytes as progress."""

    def write(self, content: Any) -> int:
        transferred.note(len(content))
        return super().write(content)
