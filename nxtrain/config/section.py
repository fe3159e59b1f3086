"""Base class of the tables of a configuration, and types of values that several tables have."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from nxtrain.common.io.paths import local
from nxtrain.config.bounds import MAX_SIZE

LocalText = Annotated[str, AfterValidator(local)]
Size = Annotated[int, Field(gt=0, le=MAX_SIZE)]


class Section(BaseModel):
    """A table of the configuration file."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
