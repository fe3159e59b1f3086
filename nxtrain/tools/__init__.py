"""Tools around a run: benchmarks, compilation, checks of machines, evaluation, reports and traces."""

from __future__ import annotations
