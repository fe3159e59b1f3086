"""Imports of the processes of `tests.support.commands`, done once: what the commands themselves import late.

Objects that exist by now are exempt from garbage collection: a collection in a fork would copy their pages.
"""

from __future__ import annotations

import gc

import numpy.random  # noqa: F401
import pyarrow.compute  # noqa: F401
import pydantic.type_adapter  # noqa: F401
import torch.utils.tensorboard  # noqa: F401

import nxtrain_models.llama  # noqa: F401
import tests.support.commands  # noqa: F401
from tests.support import processes

processes.build_commands()
gc.collect()
gc.freeze()
