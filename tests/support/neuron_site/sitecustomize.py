"""Makes each Python process that has this folder on PYTHONPATH believe in a Trainium machine; see `neuron_machine`."""

from __future__ import annotations

from tests.support.neuron_machine import pretend

pretend()
