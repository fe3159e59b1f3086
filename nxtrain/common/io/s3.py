"""Access to S3: addresses, a client, and translation of errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nxtrain.common.errors import BackendError, ConfigError, StorageError

SCHEME = "s3://"

_PASSING = {"RequestTimeout", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestThrottled"}
"""Codes of responses below status 500 that mean that S3 is busy.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""
_FAILURE = 500
"""Lowest HTTP status of server errors."""


def split(url: str) -> tuple[str, str]:
    """Split `s3://bucket/prefix` into the bucket and the prefix, which may be empty."""
    bucket, _, prefix = url.removeprefix(SCHEME).partition("/")
    if not bucket:
        raise ConfigError(f"{url} names no bucket; write s3://BUCKET/PREFIX")
    return bucket, prefix.strip("/")


def open_client(url: str) -> Any:
    """Open a client with the settings of AWS's own tools, such as AWS_PROFILE and AWS_ENDPOINT_URL."""
    with explained(url):
        import boto3

        return boto3.client("s3")


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Translate errors of boto3 within this context into errors for people."""
    try:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise BackendError(f"{url} needs boto3, which is not installed: pip install 'nxtrain[s3]'") from error
    try:
        yield
    except (Boto3Error, BotoCoreError, ClientError) as error:
        if _may_pass(error):
            raise StorageError(f"{url}: {error}; S3 does not answer as it should, start again when it does") from error
        hint = "check the bucket's name, and your access with: aws s3 ls"
        raise BackendError(f"{url}: {error}; {hint} {SCHEME}{split(url)[0]}/") from error


def is_missing(error: Any) -> bool:
    """True if a ClientError means that the object does not exist."""
    return error.response["Error"]["Code"] in {"404", "NoSuchKey", "NotFound"}


def is_replaced(error: Any) -> bool:
    """True if a ClientError means that the object has another version than the request names."""
    return error.response["Error"]["Code"] in {"412", "PreconditionFailed"}


def _may_pass(error: BaseException) -> bool:
    """True if the same request may succeed later: the server or the network failed, not the request."""
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
