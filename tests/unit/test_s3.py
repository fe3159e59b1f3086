"""Errors of S3 are failures of the server, which may pass, or refusals, which do not; the codes are those of AWS."""

from __future__ import annotations

from typing import Any

import pytest
from boto3.exceptions import S3UploadFailedError
from botocore import exceptions as s3_errors

from nxtrain.common.errors import BackendError, NxtrainError, StorageError
from nxtrain.common.io.bucket import BucketPath
from nxtrain.common.io.s3 import S3
from nxtrain.launch.exit_codes import FINAL
from tests.support.object_stores import BUCKET, s3, s3_variables

__all__ = ["s3", "s3_variables"]

ADDRESS = "s3://bucket/run"


def answer(status: int, code: str) -> s3_errors.ClientError:
    response: Any = {"Error": {"Code": code, "Message": "words"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return s3_errors.ClientError(response, "PutObject")


def wrapped() -> S3UploadFailedError:
    error = S3UploadFailedError("Failed to upload")
    error.__context__ = answer(500, "InternalError")
    return error


PASSING = [
    answer(500, "InternalError"),
    answer(503, "SlowDown"),
    answer(400, "RequestTimeout"),
    s3_errors.EndpointConnectionError(endpoint_url=ADDRESS),
    s3_errors.ConnectTimeoutError(endpoint_url=ADDRESS),
    s3_errors.ReadTimeoutError(endpoint_url=ADDRESS),
    s3_errors.ConnectionClosedError(endpoint_url=ADDRESS),
    s3_errors.IncompleteReadError(actual_bytes=1, expected_bytes=2),
    wrapped(),
]
FIRM = [
    answer(403, "AccessDenied"),
    answer(404, "NoSuchBucket"),
    answer(400, "InvalidToken"),
    s3_errors.NoCredentialsError(),
    s3_errors.NoRegionError(),
    s3_errors.ProfileNotFound(profile="mine"),
    S3UploadFailedError("Failed to upload"),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_a_failure_of_the_server_or_the_way_to_it_lets_the_launcher_try_again(error: Exception) -> None:
    with pytest.raises(StorageError) as raised, S3(BucketPath(ADDRESS)).explained(ADDRESS):
        raise error
    assert str(raised.value).startswith(f"{ADDRESS}: {error}")
    assert StorageError.exit_code not in FINAL


@pytest.mark.parametrize("error", FIRM, ids=repr)
def test_a_refusal_is_final(error: Exception) -> None:
    with pytest.raises(BackendError) as raised, S3(BucketPath(ADDRESS)).explained(ADDRESS):
        raise error
    assert "aws s3 ls s3://bucket/" in str(raised.value)
    assert raised.value.exit_code in FINAL


def test_a_server_that_is_gone_is_a_failure_that_may_pass(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(NxtrainError, match="Could not connect") as raised, S3(BucketPath(ADDRESS)).explained(ADDRESS):
        boto3.client("s3").list_objects_v2(Bucket=BUCKET)
    assert type(raised.value) is StorageError
