"""Imports of every process of the XLA lane, done once; see `tests.support.xla_processes`.

The collector would visit what is imported again and again. Objects that exist in the end are exempt from it: a
collection in a fork would copy their pages.
"""

from __future__ import annotations

import gc
from importlib import import_module

from tests.support import processes
from tests.support.neuron_machine import leave_out_unused

MODULES = (
    "torch_xla.core.xla_model",
    "torch_xla.debug.metrics",
    "torch_xla.distributed.xla_backend",
    "torch_xla.runtime",
    "transformers.models.llama.modeling_llama",
    "tests.support.command_ranks",
    "tests.support.contract_layers",
    "tests.support.drawn_runs",
    "tests.xla.test_extraction",
    "tests.xla.test_neuron_ranks",
    "tests.xla.test_neuron_rounding",
    "tests.xla.test_recompiles",
    "tests.dist.test_reduction_types",
    "tests.support.xla_bodies",
    "tests.support.xla_engine",
    "tests.xla.test_guard",
    "tests.support.xla_processes",
    "tests.xla.test_pipeline",
    "tests.xla.test_ranks",
    "tests.xla.test_stages",
)

gc.disable()
leave_out_unused()
for name in MODULES:
    import_module(name)
processes.build_commands()
gc.freeze()
gc.enable()
