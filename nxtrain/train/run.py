"""A run on one rank that is ready to train: training, orderly shutdown, and results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nxtrain.checkpoint.meta import Meta
from nxtrain.common.errors import CheckpointError, DivergedError, NxtrainError, RestartError, StoppedBySignal
from nxtrain.common.run_folder import ADAPTER_DIR
from nxtrain.data import Data
from nxtrain.metrics.run_observer import Outcome
from nxtrain.metrics.work_meter import WorkMeter
from nxtrain.train.checkpoints import Checkpoints
from nxtrain.train.compatibility import RunInputs, meta_at
from nxtrain.train.context import RunContext
from nxtrain.train.health.out_of_memory import explaining_memory
from nxtrain.train.health.recompiles import Recompiles
from nxtrain.train.results import Summary, save_adapter, summarize
from nxtrain.train.trainer import Trainer


@dataclass(frozen=True)
class Run:
    """Assembled run on one rank; `assemble` creates it.

    Args:
        context: The open context.
        data: Data of the run.
        inputs: Identity of the data and the tokenizer.
        begun: Metadata of the step from which the run continues.
        trainer: Training loop with the state, the observers and the sinks of the records.
        checkpoints: Checkpoints of the run.
        recompiles: Observer of graphs that are compiled again.
        work: Meter of this rank's time by kind of work.
    """

    context: RunContext
    data: Data
    inputs: RunInputs
    begun: Meta
    trainer: Trainer
    checkpoints: Checkpoints
    recompiles: Recompiles
    work: WorkMeter

    def train(self) -> float | None:
        """Train to the last step and wait for the last checkpoint; return the last held-out loss, or None."""
        context = self.context
        try:
            with explaining_memory(context, self.trainer.state), self._draining(), self._observed():
                val_loss = self.trainer.run(self.begun.step)
                self.recompiles.settle()
                context.drain()
                self.checkpoints.close(heartbeat=context.drain, stop_requested=lambda: context.is_stop_requested)
                return val_loss
        finally:
            for sink in self.trainer.sinks:
                sink.close()

    def finish(self, val_loss: float | None) -> None:
        """Write the results of the run: the adapter, and the summary if there is a held-out loss."""
        context, config = self.context, self.context.config
        if config.finetune.adapts:
            meta = meta_at(0, context.plan, self.inputs)
            save_adapter(config.run.dir / ADAPTER_DIR, self.trainer.state, meta)
        if context.is_leader and val_loss is not None and not config.finetune.compares:
            num_rows = config.train.eval_batches * config.train.global_batch
            summary = Summary.of(val_loss, self.data, num_rows, doc_mask=config.data.doc_mask)
            summarize(config.run.dir, summary, context.print_line)

    @contextmanager
    def _observed(self) -> Iterator[None]:
        """Context that reports the beginning and the end of training to the observers."""
        observers, watchdog = self.trainer.observers, self.context.watchdog
        observers.begin(self.begun.step)
        if watchdog is not None:
            watchdog.report_to(observers, self.work.spent)
        try:
            yield
        except BaseException as error:
            cause: BaseException = error
            if isinstance(error, Exception) and not isinstance(error, NxtrainError):
                # The library's error, such as a lost connection, may follow from an earlier error: the cause.
                cause = self.context.backend.failed(error)
            outcome: Outcome = "failed"
            if isinstance(error, StoppedBySignal):
                outcome = "stopped"
            elif watchdog is not None and isinstance(error, Exception):
                watchdog.await_verdict(error)  # a peer may be lost because the run hangs
            observers.end(outcome, f"{type(cause).__name__}: {cause}")
            raise
        observers.end("done", "")

    @contextmanager
    def _draining(self) -> Iterator[None]:
        """Context that waits for the last checkpoint if the run ends on all ranks by agreement.

        After other errors it does not wait, since ranks may be lost.
        """
        context = self.context
        try:
            yield
        except (DivergedError, RestartError) as ended:
            context.drain()
            try:
                self.checkpoints.close(is_urgent=True, heartbeat=context.drain)
            except CheckpointError as error:
                context.print_line(f"WARNING: {error}")
            raise ended from None
        except StoppedBySignal:
            context.drain()
            self.checkpoints.close(
                is_urgent=True, heartbeat=context.drain
            )  # a stop without its checkpoint is a failure
            raise
