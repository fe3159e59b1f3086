"""Draw runs from a seed and hold each to transformers with `torch.optim`: `python scripts/fuzz.py SEED N`.

Lanes: `process` (one process, float32), `bf16` (one process), `gloo` (ranks that are processes, every layout), `fp16`
(the same in fp16, beside torch's scaler), `native` (on the stand-in of TorchNeuron), `xla` (devices of torch-xla on
this CPU) and `command` (`nxtrain launch`). A failure prints the line that repeats the run; with `--command` that line
goes through the command line. Exit code 0 when all runs agree, 1 when not.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
LANES = (
    "process",
    "bf16",
    "gloo",
    "cp",
    "mixtures",
    "process-mixtures",
    "ep-mixtures",
    "fp16",
    "native",
    "xla",
    "command",
)

if TYPE_CHECKING:
    from tests.support.drawn import Drawn


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int, metavar="SEED", help="draws the runs")
    parser.add_argument("number", type=int, nargs="?", default=20, metavar="N", help="runs of each lane (20)")
    parser.add_argument(
        "--lane", action="append", choices=LANES, help="only this lane; may be repeated (all but command)"
    )
    parser.add_argument("--only", metavar="LANE:INDEX", help="only this run")
    parser.add_argument("--command", action="store_true", help="run through `nxtrain launch`")
    options = parser.parse_args()

    from tests.support.drawn_lanes import Lanes

    wanted: list[tuple[str, int]]
    if options.only:
        lane, _, index = options.only.partition(":")
        if lane not in LANES or not index.isdecimal():
            parser.error(f"--only {options.only}: write LANE:INDEX, with LANE one of {', '.join(LANES)}")
        wanted = [(lane, int(index))]
    else:
        lanes = options.lane or LANES[:-1]
        wanted = [(lane, index) for index in range(options.number) for lane in lanes]
    with tempfile.TemporaryDirectory(prefix="nxtrain-fuzz-") as folder, Lanes(options.seed, Path(folder)) as runs:
        failed = sum(not _run(runs.draw(*one), runs.check, options.command) for one in wanted)
    print(f"{len(wanted) - failed} passed, {failed} failed", flush=True)
    sys.exit(1 if failed else 0)


def _run(drawn: Drawn, check: Callable[..., str], by_command: bool) -> bool:
    """Run one draw and print its line; true if the run agrees."""
    begin = time.monotonic()
    try:
        error = check(drawn, by_command=by_command)
        verdict = f"ok    {error}"
    except Exception as failure:
        verdict = f"FAIL  {failure}\n      {drawn.reproduce}\n      {shlex.join(drawn.overrides)}"
    print(f"{drawn!s:14} {drawn.degrees!s:32} {time.monotonic() - begin:6.1f} s  {verdict}", flush=True)
    return verdict.startswith("ok")


if __name__ == "__main__":
    if str(ROOT) not in sys.path:  # for this process, and for those that it starts
        sys.path.insert(0, str(ROOT))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    main()
