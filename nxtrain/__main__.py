"""Entry point of `python -m nxtrain`, the command `nxtrain`, which torchrun can start by module name."""

from __future__ import annotations

import os
import signal
import sys

from nxtrain.common.errors import BackendError, explained
from nxtrain.common.process import garbage, stacks
from nxtrain.common.process.streams import open_standard_streams


def main() -> None:
    """Run the command; from its start on, the `DUMP` signal prints the stacks of its threads."""
    open_standard_streams()
    try:
        os.getcwd()  # libraries end the process in words of their own without it
    except OSError as error:
        print(f"error: the working directory is gone: {error.strerror}; change to another one", file=sys.stderr)
        sys.exit(BackendError.exit_code)
    stacks.answer_requests()
    garbage.collect_rarely()
    try:
        from nxtrain.cli.main import main  # its imports take a while
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)  # as the commands do
    except ImportError as error:
        known = explained(error)
        if known is None:
            raise
        print(f"error: {known}", file=sys.stderr)
        sys.exit(known.exit_code)
    main()


if __name__ == "__main__":
    main()
