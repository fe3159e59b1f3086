"""What a checkpoint says about itself beside its tensors: `meta.json`, which seals it.

It holds a checksum of the manifest, which holds those of all files, and one of itself.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from nxtrain.checkpoint.directory import META
from nxtrain.errors import CheckpointError, DamagedError
from nxtrain.family import ModelConfig, ModelFamily, find_family
from nxtrain.io.object_store import Place, content_of
from nxtrain.io.read_retry import ROTTEN, damage, unsteady

FORMAT = 2
_SEAL = "crc32"
_DIGEST_BYTES = 16


class Meta(BaseModel):
    """The state of a run that is not a tensor, and what is needed to make sense of the tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: int = FORMAT
    """Version of the layout of checkpoints."""
    step: int
    """Finished updates."""
    samples: int
    """Sequences consumed by them: where the data goes on."""
    tokens: int
    """Target tokens consumed by them."""
    global_batch: int = 0
    """Sequences of an update; 0 if nothing was trained."""
    seed: int
    """Seed of the run."""
    family: str
    """Model family."""
    config: dict[str, Any]
    """The family's configuration."""
    dtype: str
    """Torch's name of the parameters' type."""
    state_dtype: str = "float32"
    """The same of the optimizer's running means."""
    data_fingerprint: str = ""
    """Identity of the data."""
    shuffle: bool | None = None
    """Whether its rows came in an order of their own; None if that is not known."""
    settings: dict[str, Any] = {}
    """What else moves the course of a run, by its key; empty if that is not known."""
    tokenizer_fingerprint: str = ""
    """Identity of the tokenizer; empty if the data named none."""
    end_of_text: str = ""
    """Its token that ends a document; empty if that is not known."""
    config_fingerprint: str = ""
    """Identity of the configuration."""
    code_fingerprint: str = ""
    """Identity of the code that trained."""
    manifest_crc32: int = 0
    """Of the manifest; filled in by `save`."""
    stability: dict[str, Any] = {}
    """What tells spikes and divergence, of `nxtrain.metrics.stability`."""
    mesh: dict[str, int] = {}
    """Degrees of the run that wrote it, by axis; filled in by `save`."""
    kinds: tuple[str, ...] = ()
    """Kinds of tensors it holds; filled in by `save`."""

    def model(self) -> tuple[ModelFamily, ModelConfig]:
        """The family and the configuration of the model."""
        family = find_family(self.family)
        return family, family.config_type.model_validate(self.config)

    def sealed(self) -> str:
        """The text of `meta.json`."""
        return _seal(self.model_dump(mode="json"))


def fingerprint(parts: Iterable[bytes]) -> str:
    """Identity of some contents, in their order."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def read_meta(path: Place) -> Meta:
    """Read the `meta.json` of a checkpoint.

    Raises:
        DamagedError: It is no longer what was written.
        CheckpointError: It is absent, or of another format.
    """
    file = path / META
    try:
        text = unsteady.read(lambda: content_of(file), file).decode()
        content = json.loads(text)
    except OSError as error:
        if error.errno in ROTTEN:
            raise damage(file, error) from error
        raise CheckpointError(f"{path} is not a complete checkpoint: cannot read {META}: {error.strerror}") from error
    except (RecursionError, ValueError) as error:
        raise DamagedError(file, f"it is no JSON: {error}") from error
    if not isinstance(content, dict) or "format" not in content:
        raise DamagedError(file, "it tells no format")
    if content["format"] != FORMAT and _SEAL not in content:
        raise CheckpointError(f"{file} has format {content['format']}; this nxtrain reads format {FORMAT}")
    content.pop(_SEAL, None)
    if text != _seal(content):
        raise DamagedError(file, "its content is not what was written")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{file} has format {content['format']}; this nxtrain reads format {FORMAT}")
    try:
        return Meta.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise CheckpointError(f"{file} was written by another version of nxtrain: {error}") from error


def _seal(content: dict[str, Any]) -> str:
    checksum = zlib.crc32(json.dumps(content).encode())
    return json.dumps({**content, _SEAL: checksum}, indent=2) + "\n"
