"""Metadata of a checkpoint, `meta.json`; written last, so that its presence marks a complete checkpoint.

The file holds a checksum of the manifest, and one of itself. The manifest holds the checksums of all tensor files.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from nxtrain.checkpoint.directory import META
from nxtrain.common.errors import CheckpointError, DamagedError, cause_of
from nxtrain.common.family import ModelConfig, ModelFamily, find_family
from nxtrain.common.io.object_store import Location, content_of
from nxtrain.common.io.read_retry import ROTTEN, damage, unsteady

FORMAT = 2
_SEAL = "crc32"
_DIGEST_BYTES = 16


class Meta(BaseModel):
    """State of a run that is not a tensor, and the description of the model."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: int = FORMAT
    """Version of the layout of checkpoints."""
    step: int
    """Number of finished updates."""
    samples: int
    """Sequences consumed by the updates: the position at which the data resumes."""
    tokens: int
    """Target tokens consumed by the updates."""
    global_batch: int = 0
    """Sequences of an update, after the stages of a ramp; 0 if no update was made."""
    batch_ramp: tuple[dict[str, int], ...] = ()
    """Stages of the ramp of the global batch, see `train.batch_ramp`."""
    seq_ramp: tuple[dict[str, int], ...] = ()
    """Stages of shorter sequences, see `train.seq_ramp`."""
    seed: int
    """Seed of the run."""
    family: str
    """Model family."""
    config: dict[str, Any]
    """The family's configuration."""
    adapter: dict[str, Any] = {}
    """Keys of [finetune] that shape the adapters, which are all that the checkpoint holds; empty for whole models."""
    base: str = ""
    """Folder of the frozen weights next to adapters."""
    base_fingerprint: str = ""
    """Identity of the frozen weights."""
    dtype: str
    """Type of the parameters, by torch's name."""
    state_dtype: str = "float32"
    """Type of the optimizer's running means, by torch's name."""
    loss_scale: dict[str, float] = {}
    """Scale of fp16 gradients, the steps since it changed, and the number of updates; empty for other types."""
    data_cursor: dict[str, Any] = {}
    """Position at which data that is packed while consumed resumes, see `nxtrain.data.stream_loader`; else empty."""
    rewarm_after: int | None = None
    """Step after which optim.rewarm_steps raise the learning rate again; None: nowhere."""
    data_fingerprint: str = ""
    """Identity of the data."""
    shuffle: bool | None = None
    """True if the rows were shuffled; None if unknown."""
    settings: dict[str, Any] = {}
    """Other configuration values that determine the training trajectory, by key; empty if unknown. Of converted weights
    without a tokenizer, ids of special tokens by file of Hugging Face. Readers ignore unknown keys."""
    tokenizer_fingerprint: str = ""
    """Identity of the tokenizer; empty if the data named none."""
    end_of_text: str = ""
    """The tokenizer's token that ends a document; empty if unknown."""
    config_fingerprint: str = ""
    """Identity of the configuration."""
    code_fingerprint: str = ""
    """Identity of the code of the run."""
    manifest_crc32: int = 0
    """Checksum of the manifest; filled in by `save`."""
    stability: dict[str, Any] = {}
    """State of the detector of spikes and divergence, `nxtrain.metrics.stability`."""
    mesh: dict[str, int] = {}
    """Parallel degrees of the run that wrote the checkpoint, by axis; filled in by `save`."""
    kinds: tuple[str, ...] = ()
    """Kinds of tensors in the checkpoint; filled in by `save`."""

    def model(self) -> tuple[ModelFamily, ModelConfig]:
        """Family and configuration of the model."""
        family = find_family(self.family)
        return family, family.config_type.model_validate(self.config)

    def sealed(self) -> str:
        """Text of `meta.json`, with its checksum."""
        return _seal(self.model_dump(mode="json"))


def fingerprint(parts: Iterable[bytes]) -> str:
    """Hash of a sequence of byte strings; their order and their bounds count."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def read_meta(path: Location) -> Meta:
    """Read the `meta.json` of a checkpoint."""
    file = path / META
    try:
        text = unsteady.read(lambda: content_of(file), file).decode()
        content = json.loads(text)
    except OSError as error:
        if error.errno in ROTTEN:
            raise damage(file, error) from error
        raise CheckpointError(f"{path} is not a complete checkpoint: cannot read {META}: {error.strerror}") from error
    except (RecursionError, ValueError) as error:
        raise DamagedError(file, f"it is no JSON: {cause_of(error)}") from error
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
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}"
        raise CheckpointError(f"{file} was written by another version of nxtrain: {reason}") from error


def _seal(content: dict[str, Any]) -> str:
    checksum = zlib.crc32(json.dumps(content).encode())
    return json.dumps({**content, _SEAL: checksum}, indent=2) + "\n"
