"""Client of Amazon S3 and of compatible storage, based on boto3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nxtrain.common.errors import CheckpointError
from nxtrain.common.io.bucket import PIECE_BYTES, BucketService, Cause, Stat, VerifiedStream, receive
from nxtrain.common.io.checksummed_file import FileDigest, transferred

_PASSING = {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestThrottled"}
"""Error codes of S3 below HTTP status 500 that mean that the service is busy.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""
_FAILURE = 500
"""Lowest HTTP status of server errors."""
_CHECKSUM = {"ChecksumAlgorithm": "CRC32"}
"""Checksum of uploads: S3 recomputes it from the received bytes, and rejects a mismatch."""
_MAX_PARTS = 10_000
"""Maximum number of parts of one upload, a limit of S3."""
_DELETE = 1000
"""Maximum number of names in one delete request, a limit of S3."""


class S3(BucketService):
    """A bucket of S3, configured as AWS's own tools are, for example by AWS_PROFILE and AWS_ENDPOINT_URL."""

    extra = "s3"
    client: Any

    def vendor_errors(self) -> tuple[type[Exception], ...]:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError

        return Boto3Error, BotoCoreError, ClientError

    def open(self, address: str) -> None:
        import boto3

        self.client = boto3.client("s3")

    def cause(self, error: Any) -> Cause:
        from botocore.exceptions import ClientError

        if isinstance(error, ClientError):
            code = error.response["Error"]["Code"]
            if code in {"404", "NoSuchKey", "NotFound"}:
                return "absent"
            if code in {"412", "PreconditionFailed"}:
                return "replaced"
        return "passing" if _may_pass(error) else "refused"

    def stat(self, key: str) -> Stat:
        head = self.client.head_object(Bucket=self.bucket, Key=key)
        return Stat(int(head["ContentLength"]), str(head["ETag"]))

    def read(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read())

    def read_range(self, key: str, tag: str, view: memoryview, start: int) -> int:
        wanted = f"bytes={start}-{start + len(view) - 1}"
        answer = self.client.get_object(Bucket=self.bucket, Key=key, Range=wanted, IfMatch=tag)
        return receive(answer["Body"].iter_chunks(PIECE_BYTES), view)

    def sizes(self, prefix: str) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix):
            for item in page.get("Contents", ()):
                sizes[item["Key"]] = item["Size"]
        return sizes

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=content, **_CHECKSUM)

    def upload(self, key: str, content: VerifiedStream, stored: FileDigest) -> None:
        from boto3.s3.transfer import TransferConfig

        # Each part is one or more blocks, so that only the parts in transfer are in memory.
        part_bytes = stored.block_bytes * max(1, -(-len(stored.xxh3) // _MAX_PARTS))
        settings = TransferConfig(multipart_threshold=part_bytes, multipart_chunksize=part_bytes, max_concurrency=2)
        self.client.upload_fileobj(
            content, self.bucket, key, ExtraArgs=_CHECKSUM, Config=settings, Callback=transferred.note
        )

    def download(self, key: str, target: Path) -> None:
        self.client.download_file(self.bucket, key, str(target), Callback=transferred.note)

    def delete(self, keys: list[str]) -> None:
        for first in range(0, len(keys), _DELETE):
            names = [{"Key": key} for key in keys[first : first + _DELETE]]
            answer = self.client.delete_objects(Bucket=self.bucket, Delete={"Objects": names, "Quiet": True})
            for failed in answer.get("Errors", ()):
                raise CheckpointError(f"s3://{self.bucket}: cannot delete {failed['Key']}: {failed['Message']}")


def _may_pass(error: BaseException) -> bool:
    """True if the server or the network caused an error, so that the same request may succeed later."""
    from boto3.exceptions import RetriesExceededError
    from botocore.exceptions import ClientError, HTTPClientError, IncompleteReadError
    from botocore.exceptions import ConnectionError as NoConnectionError

    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= _FAILURE or error.response.get("Error", {}).get("Code") in _PASSING
    if isinstance(error, HTTPClientError | NoConnectionError | IncompleteReadError | RetriesExceededError):
        return True
    # boto3's own errors describe the original error in text, and have it as their cause.
    cause = error.__cause__ or error.__context__
    return cause is not None and _may_pass(cause)
