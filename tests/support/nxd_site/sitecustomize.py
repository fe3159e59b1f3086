"""Gives each Python process that has this folder on PYTHONPATH a NeuronX Distributed as if installed; see `nxd_cpu`."""

from __future__ import annotations

from tests.support.nxd_cpu import prepare

prepare(cpu_mode=False)
