"""Compiled graphs in an S3 bucket, for nodes to share.

`objects/<sha256>` holds each file under its own hash, so that two nodes that upload the same graph never overwrite each
other's bytes; `entries/<compiler>/<module>.json` lists the files of an entry and is written after all of them. S3 shows
an object whole or not at all. Nothing here deletes.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from nxtrain.compile.cache import UnusableEntryError
from nxtrain.compile.entries import Key, parse_key
from nxtrain.compile.entry_hashes import Content, Seal, damage, from_json, hash_file, to_json
from nxtrain.io.s3 import explained, is_missing, open_client, split


class Bucket:
    """Cache in S3; credentials and endpoint come from AWS's usual sources, such as AWS_PROFILE and AWS_ENDPOINT_URL.

    Args:
        url: `s3://bucket/prefix`.

    Raises:
        ConfigError: The address names no bucket.
        BackendError: boto3 is not installed, or finds no region, endpoint or profile to work with.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._name, prefix = split(url)
        self._prefix = f"{prefix}/" if prefix else ""
        self._client: Any = open_client(url)

    def __str__(self) -> str:
        return self._url

    def done(self) -> set[Key]:
        """Keys of the complete entries in the bucket."""
        start = f"{self._prefix}entries/"
        with self._explained():
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._name, Prefix=start)
            names = [item["Key"].removeprefix(start) for page in pages for item in page.get("Contents", ())]
        return {key for name in names if name.endswith(".json") and (key := parse_key(name.removesuffix(".json")))}

    def size_bytes(self, key: Key) -> int:
        """Size of an entry in bytes; 0 if its list of files is unusable."""
        try:
            return sum(file.size_bytes for file in self._seal(key).values())
        except UnusableEntryError:
            return 0

    def fetch(self, key: Key, target: Path) -> Seal:
        """Download an entry and verify its hashes.

        Args:
            key: Key of the entry.
            target: An empty folder.

        Raises:
            UnusableEntryError: Files of the entry are missing or differ from their hashes.
        """
        seal = self._seal(key)
        for name, file in seal.items():
            with self._explained():
                try:
                    self._client.download_file(self._name, self._object(file), str(target / name))
                except self._client.exceptions.ClientError as error:
                    if is_missing(error):
                        raise UnusableEntryError(f"damaged: {self._object(file)} is missing") from error
                    raise
        damaged = damage(seal, {name: hash_file(target / name) for name in seal})
        if damaged:
            raise UnusableEntryError(f"damaged: {damaged}")
        return seal

    def store(self, key: Key, folder: Path, seal: Seal) -> None:
        """Upload an entry: every file that the bucket lacks, then the list of files.

        Args:
            key: Key of the entry.
            folder: Folder with the entry's files, which must not change during the upload.
            seal: Hashes of the files.
        """
        with self._explained():
            for name, file in seal.items():
                if not self._has(file):
                    self._client.upload_file(str(folder / name), self._name, self._object(file))
            body = json.dumps({"files": to_json(seal)}, indent=1).encode()
            self._client.put_object(Bucket=self._name, Key=self._entry(key), Body=body)

    def _seal(self, key: Key) -> Seal:
        with self._explained():
            body = self._client.get_object(Bucket=self._name, Key=self._entry(key))["Body"].read()
        try:
            return from_json(json.loads(body)["files"])
        except (RecursionError, ValueError, KeyError, TypeError) as error:
            raise UnusableEntryError(f"{self._entry(key)} is no list of files: {error}") from error

    def _has(self, file: Content) -> bool:
        try:
            head = self._client.head_object(Bucket=self._name, Key=self._object(file))
        except self._client.exceptions.ClientError as error:
            if is_missing(error):
                return False
            raise
        return bool(head["ContentLength"] == file.size_bytes)

    def _object(self, file: Content) -> str:
        return f"{self._prefix}objects/{file.sha256}"

    def _entry(self, key: Key) -> str:
        return f"{self._prefix}entries/{key}.json"

    def _explained(self) -> AbstractContextManager[None]:
        return explained(self._url)
