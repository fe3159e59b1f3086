"""torchrun that ends with the exit code of the rank that failed, where torchrun itself always ends with 1.

A program and no library: the one module of this package that imports torch. It takes torchrun's options, as in
`python -m nxtrain.launch.torchrun --nproc-per-node=2 -m nxtrain train CONFIG`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(argv: Sequence[str]) -> int:
    """Run the ranks of this node under torch's elastic agent and return the exit code."""
    try:
        run.run(run.parse_args(argv))
    except ChildFailedError as error:
        return blame([failure.exitcode for _, failure in sorted(error.failures.items())])
    except SignalException as error:
        return 128 + error.sigval
    return 0


def blame(exit_codes: Sequence[int]) -> int:
    """The exit code that tells most: one of ours, else a crash, else a signal as a shell counts it.

    Ranks that lose a peer crash (1) or are killed (negative) at nearly the same moment as the one that knows why.
    """
    known = [code for code in exit_codes if code > 1]
    crashed = [code for code in exit_codes if code > 0]
    return (known or crashed or [128 - exit_codes[0]])[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
