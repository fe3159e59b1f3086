"""Base class of the configuration sections, and the types of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from nxtrain.common.io.paths import BUCKET_SCHEMES, local, local_or_bucket, model_location, scheme_of, storage
from nxtrain.config.bounds import MAX_INT, MAX_RANKS, MAX_SIZE


def _graph_folder(path: Path) -> Path:
    # A path keeps one of the two slashes of an address.
    return path if scheme_of(str(path)) in BUCKET_SCHEMES else Path(local(str(path)))


def _not_empty(value: object) -> object:
    """Refuse an empty path, which Python would take for the working directory."""
    if value == "":
        raise ValueError("names no path; leave the key out for its default, or write . for the working directory")
    return value


# TOML has no paths, so a string becomes one.
LocalPath = Annotated[
    Path, Field(strict=False), AfterValidator(lambda path: Path(local(str(path)))), BeforeValidator(_not_empty)
]
LocalText = Annotated[str, AfterValidator(local)]
ModelLocation = Annotated[str, AfterValidator(model_location)]
CorpusPlace = Annotated[str, AfterValidator(local_or_bucket)]
StorageLocation = Annotated[str, AfterValidator(storage)]
"""Folder or object storage address; `nxtrain.config.check` reports an address without a bucket."""
GraphFolder = Annotated[Path, Field(strict=False), AfterValidator(_graph_folder), BeforeValidator(_not_empty)]
"""Folder on a disk for compiled graphs. `nxtrain.config.cache_dir` reports a bucket address, and names a command that
fills a folder from it."""
Beta = Annotated[float, Field(ge=0, lt=1)]
PositiveInt = Annotated[int, Field(gt=0, le=MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT)]
Size = Annotated[int, Field(gt=0, le=MAX_SIZE)]
Degree = Annotated[int, Field(gt=0, le=MAX_RANKS)]
DerivedDegree = Annotated[int, Field(ge=0, le=MAX_RANKS)]
Seconds = Annotated[float, Field(ge=1e-3, le=1e9)]


class Section(BaseModel):
    """Base class of a table of the configuration file, with strict types and frozen values."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
