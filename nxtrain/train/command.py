"""`nxtrain train`: a whole run on one rank, from a loaded configuration to the last checkpoint."""

from __future__ import annotations

from nxtrain.common.process.clock import Instant
from nxtrain.common.process.console import PipeSafeConsole
from nxtrain.common.process.signals import Signals
from nxtrain.config.load import Loaded
from nxtrain.train.announcements import announce
from nxtrain.train.assembly import assemble
from nxtrain.train.context import RunContext, open_run
from nxtrain.train.graph_extraction import extract_graphs


def train(loaded: Loaded, signals: Signals | None = None, began: Instant | None = None) -> None:
    """Train as configured: one rank, or every rank under torchrun.

    Args:
        loaded: The configuration.
        signals: Stop signals that this process has received; None: none.
        began: Start time of this attempt; None: now.

    Raises:
        NxtrainError: An error that the user can correct; the message names the way out.
        StoppedBySignal: The run stopped because a signal asked for it.
    """
    with open_run(loaded, signals or Signals(), began) as context:
        train_on(context)


def train_on(context: RunContext) -> None:
    """Train on an open backend, or extract the graphs of the run."""
    announce(context)
    if context.backend.extracts:
        # Printed on every node, since the compiler's tool on each node reads the lines of that node's ranks.
        console = PipeSafeConsole(stderr=True, soft_wrap=True, quiet=context.backend.local_rank != 0)
        extract_graphs(context.plan, context.backend, context.mesh, console.print)
        return
    run = assemble(context)
    val_loss = run.train()
    run.finish(val_loss)
