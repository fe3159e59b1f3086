"""Trained model in storage, from a checkpoint or a Hugging Face folder: configuration, tokenizer and weights.

A checkpoint may have been written under any parallel layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from nxtrain.backends.base import Backend
from nxtrain.checkpoint.convert.peft import CONFIG as ADAPTER_CONFIG
from nxtrain.checkpoint.convert.verify_export import open_hf_model, open_model
from nxtrain.checkpoint.directory import step_names
from nxtrain.checkpoint.meta import fingerprint, read_meta
from nxtrain.checkpoint.mirror import locate_checkpoint
from nxtrain.common import hf_files
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.errors import CheckpointError, ConfigError, DamagedError, DataError
from nxtrain.common.family import CausalLM, ModelConfig, ModelFamily
from nxtrain.common.io.object_store import Location, content_of, location_of
from nxtrain.common.mesh import Mesh
from nxtrain.data.tokenization import declared_end, declared_token, end_ids
from nxtrain.tools.eval.model_shape import generation_ends, is_hf_folder, read_hf


@dataclass(frozen=True)
class Trained:
    """Model of a checkpoint or a Hugging Face folder, with its tokenizer; the weights are read by `open`."""

    location: Location  # location of the checkpoint or the folder
    is_hf: bool
    family: ModelFamily
    config: ModelConfig
    opened: Tokenizer | None  # tokenizer; None for a model that reads no text
    ends: frozenset[int]  # ids of end-of-text tokens, as declared by the checkpoint or folder
    step: int = 0  # finished updates; 0 for a Hugging Face folder
    tokens: int = 0  # positions of the rows that the updates consumed; 0 for a Hugging Face folder
    identity: str = ""  # identifies the weights, also among weights of the same step
    prefix: int | None = None  # id of the token that begins a text; None if unknown

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model.

        The model must have been found with `reads_text=True`.
        """
        assert self.opened is not None, "the model was found with reads_text=False"
        return self.opened

    @staticmethod
    def find(address: str, *, reads_text: bool = True) -> Trained:
        """Find the model at an address, and read everything except its weights.

        Args:
            address: A checkpoint, a run folder, a mirror or its address, or a Hugging Face folder.
            reads_text: Open the tokenizer; otherwise, the tokenizer may be missing.
        """
        location = location_of(address)
        if isinstance(location, Path) and is_hf_folder(location):
            tokenizer = _open_tokenizer(location) if reads_text else None
            family, config, declared = read_hf(location)
            identity = fingerprint([str(location.resolve()).encode(), content_of(location / hf_files.CONFIG)])
            prefix = None
            if tokenizer is not None:
                declared |= end_ids(tokenizer)
                file = location / hf_files.TOKENIZER
                prefix = _prefix(tokenizer, declared_token(location, "bos_token"), declared_end(file))
            return Trained(location, True, family, config, tokenizer, declared, identity=identity, prefix=prefix)
        if isinstance(location, Path) and is_hf_folder(location, ADAPTER_CONFIG):
            hint = f"make a whole model of it: nxtrain convert peft-to-hf {location} DST --base DIR"
            raise ConfigError(f"{location} holds an adapter in PEFT's format and no model; {hint}")
        location = locate_checkpoint(address)
        tokenizer = _open_tokenizer(location) if reads_text else None
        meta = read_meta(location)
        family, config = meta.model()
        ends: frozenset[int] = frozenset()
        prefix = None
        if tokenizer is not None:
            ends = end_ids(tokenizer) | generation_ends(location)
            end = tokenizer.token_to_id(meta.end_of_text) if meta.end_of_text else None
            if end is not None:
                ends |= {end}
            begin = declared_token(location, "bos_token")
            prefix = _prefix(tokenizer, begin, meta.end_of_text)
        # The manifest has the checksums of all tensors.
        identity = f"{meta.step}-{meta.manifest_crc32:08x}"
        return Trained(location, False, family, config, tokenizer, ends, meta.step, meta.tokens, identity, prefix)

    def open(self, backend: Backend, seq_len: int, mesh: Mesh) -> CausalLM:
        """Build the model and read the weights of this rank's shard; every rank calls this method.

        Raises:
            CheckpointError: The ranks have found different checkpoints, of which a model would be a mixture.
        """
        if not self.is_hf:
            steps = Ranks(mesh, backend.host_group).gather((self.step, self.identity))
            if len({*steps}) > 1:
                found = step_names(sorted({step for step, _ in steps}))
                way_out = "a run may have saved meanwhile; start again, or name one checkpoint"
                raise CheckpointError(f"the ranks have found different checkpoints: {found}; {way_out}")
        problems = self.family.check(self.config, tp=mesh.tp.size, seq_len=seq_len)
        if problems:
            raise ConfigError(problems)
        if self.is_hf:
            assert isinstance(self.location, Path)
            return open_hf_model(self.location, backend, seq_len, mesh)
        return open_model(self.location, backend, seq_len, mesh)

    def refuse_foreign(self, largest: int) -> None:
        """Raise a ConfigError if the tokenizer's largest id is outside the model's vocabulary."""
        if largest >= self.config.vocab_size:
            reason = f"its tokenizer gives ids up to {largest}, and its vocabulary ends at {self.config.vocab_size - 1}"
            raise ConfigError(f"the tokenizer does not belong to the model: {reason}")


def _prefix(tokenizer: Tokenizer, begin: str, end: str) -> int | None:
    """Id of the token that begins a text, as in the lm-evaluation-harness: the beginning of text, else the end of text.

    Args:
        begin: Declared begin-of-text token; empty for the one that the tokenizer adds, if any.
        end: Declared end-of-text token; empty for none.
    """
    declared = tokenizer.token_to_id(begin) if begin else None
    added = tokenizer.encode("").ids
    if declared is None and added:
        declared = added[-1]
    if declared is None and end:
        declared = tokenizer.token_to_id(end)
    return declared


def _open_tokenizer(location: Location) -> Tokenizer:
    file = location / hf_files.TOKENIZER
    if not file.is_file():
        hint = "generate and eval need a tokenizer; save it there, or train with data.tokenizer=PATH"
        raise ConfigError(f"{location} has no {hf_files.TOKENIZER}: {hint}")
    content = content_of(file)
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the package tokenizers raises no narrower type
        reason = f"it is not a Hugging Face tokenizer: {error}"
        if isinstance(location, Path) and is_hf_folder(location):
            raise DataError(f"{file} is damaged: {reason}") from error
        raise DamagedError(f"{file}", reason) from error
    # A tokenizer file may configure the truncation and padding of the task for which it was made.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
