"""Process of a benchmark, which runs one turn of its side for each line on standard input, and prints JSON.

python -m nxtrain.tools.bench.worker PROGRAM NAME JOB

PROGRAM is a module of this package. Its function `turns(name, job)` makes the turns of the side NAME, by the line that
requests each.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module


def main(program: str, name: str, job: str) -> None:
    """Serve turns until standard input ends.

    Standard output has the answers only. Output of libraries goes to standard error.
    """
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        turns = import_module(f"nxtrain.tools.bench.{program}").turns(name, json.loads(job))
        for line in sys.stdin:
            print(json.dumps(turns[line.strip()]()), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
