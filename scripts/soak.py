"""Soak test: inject random faults into runs every few seconds, and compare with a run without faults.

Usage: `python scripts/soak.py 1 2`, with a seed of the faults per run. The exit code is 0 if each run on CPUs is
bitwise equal to the run without faults, and if its goodput is at most ten percentage points below the prediction for
its failures and checkpoints. Otherwise the difference is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Parse the command line, and run the soak test for each seed in sequence."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("seeds", type=int, nargs="+", metavar="SEED", help="of the faults of one run")
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    parser.add_argument("--mean-steps", type=float, default=20.0, help="steps between one fault and the next")
    parser.add_argument("--pace", type=float, default=0.1, metavar="SECONDS", help="added to each step")
    options = parser.parse_args()

    from tests.support.commands import context
    from tests.support.soak import soak

    for seed in options.seeds:
        with tempfile.TemporaryDirectory(prefix="nxtrain-soak-") as folder:
            report = soak(
                context(),
                Path(folder),
                seed,
                steps=options.steps,
                mean_steps=options.mean_steps,
                pace_s=options.pace,
                print_line=print,
            )
        print(report, flush=True)


if __name__ == "__main__":
    if str(ROOT) not in sys.path:  # for this process, and for those that it starts
        sys.path.insert(0, str(ROOT))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    main()
