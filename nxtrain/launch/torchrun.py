"""torchrun that ends with the exit code of the rank that failed, where torchrun itself always ends with 1.

It starts ranks again as torchrun does, but not after what every start would find again, such as a mistake in the
configuration or a graph that was not compiled: `--max-restarts` is for machines that fail. When a rank fails, the
others may say what they know of it before they are ended.

A program and no library: the one module of this package that imports torch. It takes torchrun's options, as in
`python -m nxtrain.launch.torchrun --nproc-per-node=2 -m nxtrain train CONFIG`.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.agent.server import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException, SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api

from nxtrain.errors import BackendError, ConfigError, DataError, DivergedError

FINAL = {kind.exit_code for kind in (ConfigError, DataError, BackendError, DivergedError)}
"""Exit codes of ranks that would end the same way again."""

LAST_WORDS_S = 5.0
"""What the others have, once a rank failed, to name whom they lost and to end by themselves."""


class Agent(LocalElasticAgent):
    """Starts ranks again unless one of them ended for good."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._let_speak()
        result: RunResult = super()._monitor_workers(worker_group)
        if any(failure.exitcode in FINAL for failure in result.failures.values()):
            self._remaining_restarts = 0
        return result

    def _let_speak(self) -> None:
        """Wait a little for the others if a rank failed: torch ends them as soon as it sees it.

        Not if it ended for good, for its own words say all, and the others would only tell what they met in its wake.
        """
        if not isinstance(self._pcontext, SubprocessContext):
            return
        processes = [handler.proc for handler in self._pcontext.subprocess_handlers.values()]
        limit = time.monotonic() + LAST_WORDS_S
        while any(codes := [process.poll() for process in processes]) and time.monotonic() < limit:
            if None not in codes or FINAL.intersection(codes):
                return
            time.sleep(0.05)


def main(argv: Sequence[str]) -> int:
    """Run the ranks of this node under torch's elastic agent and return the exit code."""
    api.LocalElasticAgent = Agent  # type: ignore[misc]  # torch has no option for it
    try:
        run.run(run.parse_args(argv))
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:  # with which the agent ends the others
                print(f"error: rank {rank}: ended by {failure.signal_name()}", file=sys.stderr)
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
