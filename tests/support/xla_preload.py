"""Imports of every process of the XLA lane, done once; see `tests.support.xla_processes`.

Objects that exist by now are exempt from garbage collection: a collection in a fork would copy their pages.
"""

from __future__ import annotations

import gc

import torch_xla.core.xla_model
import torch_xla.debug.metrics
import torch_xla.distributed.xla_backend
import torch_xla.runtime  # noqa: F401

import tests.support.command_ranks
import tests.support.contract_bodies
import tests.support.drawn_runs
import tests.support.extraction
import tests.support.neuron_bodies
import tests.support.neuron_rounding
import tests.support.recompiling
import tests.support.reductions
import tests.support.xla_bodies
import tests.support.xla_engine
import tests.support.xla_guard
import tests.support.xla_link
import tests.support.xla_pipelines
import tests.support.xla_rank_bodies
import tests.support.xla_resharding
import tests.support.xla_stages  # noqa: F401

gc.collect()
gc.freeze()
