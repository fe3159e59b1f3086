"""Metadata of a checkpoint, `meta.json`, which is written last and so marks a complete checkpoint.

The file has a checksum of the manifest and a checksum of itself. The manifest has the checksums of all tensor files.
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
from nxtrain.common.io.read_retry import TRANSIENT_ERRNOS, damage, retry_budget

FORMAT = 2
_SEAL = "crc32"
_DIGEST_BYTES = 16


class Meta(BaseModel):
    """Metadata of a checkpoint: progress of the run, model configuration, and fingerprints of data and code."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: int = FORMAT
    """Version of the checkpoint format."""
    step: int
    """Number of finished optimizer updates."""
    samples: int
    """Sequences consumed so far: the position at which the data resumes."""
    tokens: int
    """Target tokens consumed so far."""
    global_batch: int = 0
    """Sequences per update after the stages of `train.batch_ramp`; 0 if no update was made."""
    batch_ramp: tuple[dict[str, int], ...] = ()
    """Stages of the ramp of the global batch, see `train.batch_ramp`."""
    seq_ramp: tuple[dict[str, int], ...] = ()
    """Stages of shorter sequences, see `train.seq_ramp`."""
    seed: int
    """Seed of the run."""
    family: str
    """Name of the model family."""
    config: dict[str, Any]
    """Configuration of the model."""
    adapter: dict[str, Any] = {}
    """Keys of [finetune] that define the adapters, if the checkpoint holds adapters only; empty for whole models."""
    base: str = ""
    """Folder of the frozen base weights of adapters; empty for whole models."""
    base_fingerprint: str = ""
    """Fingerprint of the frozen base weights; empty for whole models."""
    dtype: str
    """Type of the parameters, by torch's name."""
    state_dtype: str = "float32"
    """Type of the optimizer's running means, by torch's name."""
    loss_scale: dict[str, float] = {}
    """fp16 loss scale, the steps since its last change, and the number of updates; empty for other types."""
    data_cursor: dict[str, Any] = {}
    """Position at which a stream of documents resumes, see `nxtrain.data.stream_loader`; empty for other data."""
    rewarm_after: int | None = None
    """Step after which the learning rate is warmed up again for `optim.rewarm_steps`; None for no rewarming."""
    data_fingerprint: str = ""
    """Fingerprint of the training data."""
    shuffle: bool | None = None
    """True if the rows of the data were shuffled; None if unknown."""
    settings: dict[str, Any] = {}
    """Other configuration values that determine the training trajectory, by key; empty if unknown.

    For weights from a Hugging Face folder, ids of special tokens by its JSON files. Readers ignore unknown keys.
    """
    tokenizer_fingerprint: str = ""
    """Fingerprint of the tokenizer; empty if the data names no tokenizer."""
    end_of_text: str = ""
    """Token of the tokenizer that ends a document; empty if unknown."""
    config_fingerprint: str = ""
    """Fingerprint of the configuration."""
    code_fingerprint: str = ""
    """Fingerprint of the run's code."""
    manifest_crc32: int = 0
    """Checksum of the manifest; filled in by `save`."""
    stability: dict[str, Any] = {}
    """State of the detector of loss spikes and divergence, see `nxtrain.metrics.stability`."""
    mesh: dict[str, int] = {}
    """Parallel degrees of the run that wrote the checkpoint, by axis; filled in by `save`."""
    kinds: tuple[str, ...] = ()
    """Kinds of tensors in the checkpoint; filled in by `save`."""

    def model(self) -> tuple[ModelFamily, ModelConfig]:
        """Return the family and the configuration of the model."""
        family = find_family(self.family)
        return family, family.config_type.model_validate(self.config)

    def sealed(self) -> str:
        """Return the content of `meta.json`, with its checksum."""
        return _seal(self.model_dump(mode="json"))


def fingerprint(parts: Iterable[bytes]) -> str:
    """Hash a sequence of byte strings; the hash depends on their order and on their boundaries."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def read_meta(path: Location) -> Meta:
    """Read the `meta.json` of a checkpoint.

    Raises:
        CheckpointError: The file cannot be read, or has another format.
        DamagedError: The file is damaged.
    """
    file = path / META
    try:
        text = retry_budget.read(lambda: content_of(file), file).decode()
        content = json.loads(text)
    except OSError as error:
        if error.errno in TRANSIENT_ERRNOS:
            raise damage(file, error) from error
        raise CheckpointError(f"{path} is not a complete checkpoint: cannot read {META}: {error.strerror}") from error
    except (RecursionError, ValueError) as error:
        raise DamagedError(file, f"it is not valid JSON: {cause_of(error)}") from error
    if not isinstance(content, dict) or "format" not in content:
        raise DamagedError(file, "it has no key format")
    if content["format"] != FORMAT and _SEAL not in content:
        raise CheckpointError(f"{file} has format {content['format']}; this nxtrain reads format {FORMAT}")
    content.pop(_SEAL, None)
    if text != _seal(content):
        raise DamagedError(file, "its checksum does not match its content")
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
