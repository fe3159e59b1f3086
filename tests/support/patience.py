"""Time limits of processes that tests wait for.

A limit is set for one lane alone on two idle cores. `NXTRAIN_TEST_PATIENCE=N` multiplies every limit by N, for lanes
whose processes take minutes where others compute beside them.
"""

from __future__ import annotations

import os

VARIABLE = "NXTRAIN_TEST_PATIENCE"
"""Variable with the factor; 1 if it is not set."""


def patient_s(seconds: float) -> float:
    """A limit in seconds, times the factor of this test session."""
    return seconds * float(os.environ.get(VARIABLE) or 1)
