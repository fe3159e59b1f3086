"""A trained model on storage, whatever layout wrote it: its shape, its tokenizer, and its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from nxtrain.backends.base import Backend
from nxtrain.checkpoint import directory
from nxtrain.checkpoint.convert.peft import CONFIG as ADAPTER_CONFIG
from nxtrain.checkpoint.convert.verify_export import open_hf_model, open_model
from nxtrain.checkpoint.meta import fingerprint, read_meta
from nxtrain.checkpoint.mirror import locate_checkpoint
from nxtrain.common.errors import ConfigError, DamagedError, DataError
from nxtrain.common.family import CausalLM, ModelConfig, ModelFamily
from nxtrain.common.io.object_store import Location, content_of, location_of
from nxtrain.common.mesh import Mesh
from nxtrain.data.tokenization import end_ids
from nxtrain.tools.eval.model_shape import CONFIG, is_hf_folder, read_hf


@dataclass(frozen=True)
class Trained:
    """A model of a checkpoint or of a Hugging Face folder."""

    location: Location  # location of the checkpoint or the folder
    is_hf: bool
    family: ModelFamily
    config: ModelConfig
    opened: Tokenizer | None  # tokenizer; None for a model that reads no text
    ends: frozenset[int]  # ids that end a text, as the checkpoint or folder declares them
    step: int = 0  # finished updates; 0 for a Hugging Face folder
    tokens: int = 0  # positions of the rows that the updates consumed; 0 for a Hugging Face folder
    identity: str = ""  # name of the weights, which differs from that of other weights of the same step

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of a model that reads text."""
        assert self.opened is not None, "the model was found with reads_text=False"
        return self.opened

    @staticmethod
    def find(address: str, *, reads_text: bool = True) -> Trained:
        """Find a model at a checkpoint, a run folder, a mirror or its address, or a Hugging Face folder.

        All but the weights is read.

        Args:
            address: Location of the model.
            reads_text: Open the tokenizer; otherwise, the tokenizer may be absent.
        """
        location = location_of(address)
        if isinstance(location, Path) and is_hf_folder(location):
            tokenizer = _open_tokenizer(location) if reads_text else None
            family, config, declared = read_hf(location)
            identity = fingerprint([str(location.resolve()).encode(), content_of(location / CONFIG)])
            if tokenizer is not None:
                declared |= end_ids(tokenizer)
            return Trained(location, True, family, config, tokenizer, declared, identity=identity)
        if isinstance(location, Path) and is_hf_folder(location, ADAPTER_CONFIG):
            hint = f"make a whole model of it: nxtrain convert peft-to-hf {location} DST --base DIR"
            raise ConfigError(f"{location} holds an adapter in PEFT's format and no model; {hint}")
        location = locate_checkpoint(address)
        tokenizer = _open_tokenizer(location) if reads_text else None
        meta = read_meta(location)
        family, config = meta.model()
        ends: frozenset[int] = frozenset()
        if tokenizer is not None:
            ends = end_ids(tokenizer)
            end = tokenizer.token_to_id(meta.end_of_text) if meta.end_of_text else None
            if end is not None:
                ends |= {end}
        # The manifest has the checksums of all tensors.
        identity = f"{meta.step}-{meta.manifest_crc32:08x}"
        return Trained(location, False, family, config, tokenizer, ends, meta.step, meta.tokens, identity)

    def open(self, backend: Backend, seq_len: int, mesh: Mesh) -> CausalLM:
        """Build the model, and read the weights of this rank; every rank calls this."""
        problems = self.family.check(self.config, tp=mesh.tp.size, seq_len=seq_len)
        if problems:
            raise ConfigError(problems)
        if self.is_hf:
            assert isinstance(self.location, Path)
            return open_hf_model(self.location, backend, seq_len, mesh)
        return open_model(self.location, backend, seq_len, mesh)

    def refuse_foreign(self, largest: int) -> None:
        """Refuse a tokenizer whose largest id the model does not have, by a ConfigError."""
        if largest >= self.config.vocab_size:
            reason = f"its tokenizer gives ids up to {largest}, and its vocabulary ends at {self.config.vocab_size - 1}"
            raise ConfigError(f"the tokenizer does not belong to the model: {reason}")


def _open_tokenizer(location: Location) -> Tokenizer:
    file = location / directory.TOKENIZER
    if not file.is_file():
        hint = "generate and eval read text and need one; save one there, or train with data.tokenizer=PATH"
        raise ConfigError(f"{location} carries no {directory.TOKENIZER}: {hint}")
    try:
        tokenizer = Tokenizer.from_buffer(content_of(file))
    except OSError:
        raise
    except Exception as error:  # tokenizers raises nothing narrower
        reason = f"it is no tokenizer of Hugging Face: {error}"
        if isinstance(location, Path) and is_hf_folder(location):
            raise DataError(f"{file} is damaged: {reason}") from error
        raise DamagedError(f"{file}", reason) from error
    # A tokenizer file may configure the truncation and padding of the task for which it was made.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
