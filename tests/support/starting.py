"""Programs that start each other in every way that a test forks: a child in a session, its successor by `execve`.

python -m tests.support.starting NAME ARGUMENT
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

CODE = 7
"""Exit code of the first program."""

CODES = {"child": 3, "failed": 1, "killed": -signal.SIGTERM}
VARIABLE = "NXTRAIN_TEST_OF_FORKS"


def main(name: str, argument: str) -> None:
    """Tell of this program, and start the next ones."""
    handled = [number.name for number in signal.Signals if callable(signal.getsignal(number))]
    print(name, argument, os.environ.get(VARIABLE), sys.argv[1:], sys.orig_argv[1:], handled, __name__, flush=True)
    if name == "first":
        signal.signal(signal.SIGTERM, lambda *_: None)  # of which a new program knows nothing
        for child, code in CODES.items():
            argv = [sys.executable, "-m", "tests.support.starting", child, "a b"]
            env = {**os.environ, VARIABLE: child}
            with subprocess.Popen(
                argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            ) as process:
                print(process.communicate("a line")[0], end="", flush=True)
            assert process.returncode == code, (child, process.returncode)
        os.execve(sys.executable, [sys.executable, "-m", "tests.support.starting", "successor", ""], {VARIABLE: "new"})
    if name == "child":
        print(sys.stdin.read(), "session of its own" if os.getsid(0) == os.getpid() else "", flush=True)
        sys.exit(CODES[name])
    if name == "failed":
        sys.exit("a failure that is told")
    if name == "killed":
        os.kill(os.getpid(), signal.SIGTERM)
    sys.exit(CODE)


if __name__ == "__main__":
    main(*sys.argv[1:])
