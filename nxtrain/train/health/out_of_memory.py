"""Report of a rank that is out of memory: bytes by kind, and configuration keys that would lower them.

The training state is counted by its tensors. Activations are already freed when the error arrives, so their bytes are
predicted as by `nxtrain plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

from torch import Tensor
from torch.distributed.tensor import DTensor

from nxtrain.common.machines import MACHINES
from nxtrain.common.process.stacks import print_line
from nxtrain.common.run_folder import LOGS_DIR
from nxtrain.common.text import size
from nxtrain.config.check import Resolved
from nxtrain.config.schema import FULLY_SHARDED
from nxtrain.plan.job import Job
from nxtrain.plan.memory import stage_bytes
from nxtrain.train.context import RunContext
from nxtrain.train.step import TrainState

SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "resource_exhausted", "unable to allocate")
"""Parts of out-of-memory messages of torch, numpy, CUDA and XLA, in lower case."""

PLANNED_AS = "p5.48xlarge"
"""Machine assumed for the prediction if `cluster.instance` names none; state and activations do not depend on it."""

PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer state"
PLANNED = "activations, planned"


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error, or a cause of the error, is a failed allocation."""
    chain: BaseException | None = error
    seen = set[int]()
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        if isinstance(chain, MemoryError) or any(sign in str(chain).lower() for sign in SIGNS):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def held_bytes(state: TrainState, plan: Resolved) -> dict[str, int]:
    """Bytes of memory that a rank uses, by kind; a storage shared by tensors counts once, for its first kind."""
    count = _Count(lazy=state.backend.collectives.lazy)
    parameters = [*state.model.parameters()]
    sums: Mapping[str, Tensor] = getattr(state.data_parallel, "sums", {})
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    of_optimizer: list[Tensor] = []
    for tensors in state.optimizer.state.values():
        of_optimizer += tensors.values()
    return {
        PARAMETERS: count.bytes(parameters),
        GRADIENTS: count.bytes([*grads, *sums.values()]),
        OPTIMIZER: count.bytes([*of_optimizer, *state.data_parallel.shards.values()]),
        PLANNED: _planned_activations(state, plan),
    }


def advice(plan: Resolved, held: Mapping[str, int], *, backend: str, dp: int, tp: int, on_host: bool) -> list[str]:
    """Advice on configuration keys that lower the memory of a rank; keys for the larger kind of memory come first.

    Args:
        plan: Validated configuration.
        held: Bytes by kind.
        backend: Name of the backend, such as `cpu`, `cuda` or `xla`.
        dp: Number of ranks of dp x cp, over which state can be sharded.
        tp: Tensor parallel degree.
        on_host: Devices and host share their memory.
    """
    train, parallel = plan.config.train, plan.config.parallel
    of_activations: list[str] = []
    of_state: list[str] = []
    if train.micro_batch > 1:
        of_activations.append(f"train.micro_batch={train.micro_batch // 2}: half of the activations")
    stronger = {"none": "selective", "selective": "full"}.get(train.remat)
    if stronger:
        of_activations.append(f"train.remat={stronger}: backward computes some activations again")
    if tp > 1 and not parallel.sequence_parallel:
        of_activations.append("parallel.sequence_parallel=true: activations between layers are cut over tp")
    logits_mib = train.logits_mib(backend)
    if logits_mib > 1:
        of_activations.append(f"train.loss_chunk_mib={logits_mib // 2}: fewer logits at once")
    if dp > 1 and parallel.shard == "none":
        of_state.append("parallel.shard=zero1: optimizer state is cut over dp; full also cuts gradients and parameters")
    elif dp > 1 and parallel.shard in ("zero1", "grad_op"):
        of_state.append("parallel.shard=full: gradients and parameters are cut over dp too")
    if parallel.shard in FULLY_SHARDED and "params" not in parallel.offload and not on_host:
        of_state.append("parallel.offload=true: parameters and optimizer state stay in host memory")
    of_state.append(f"parallel.tp={2 * tp} or parallel.pp={2 * parallel.pp}: fewer parameters on a rank")
    if on_host:
        of_state.append("checkpoint.async=false and data.workers=0: no copies of the state, no further processes")
    state_bytes = sum(size for kind, size in held.items() if kind != PLANNED)
    if held[PLANNED] > state_bytes:
        return of_activations + of_state
    return of_state + of_activations


def lines(state: TrainState, plan: Resolved) -> list[str]:
    """Lines of the out-of-memory report of a rank."""
    backend, mesh = state.backend, state.mesh
    held = held_bytes(state, plan)
    shown = ", ".join(f"{kind} {size(num_bytes)}" for kind, num_bytes in held.items())
    peak = backend.diagnostics.peak_memory_bytes()
    reached = f"; peak so far {size(peak)}" if peak else ""
    on_host = not backend.is_asynchronous
    keys = advice(plan, held, backend=backend.name, dp=mesh.dp_cp.size, tp=mesh.tp_size, on_host=on_host)
    return [
        f"error: rank {mesh.rank} is out of memory; it holds {shown}{reached}",
        f"rank {mesh.rank}: keys that would help: {'; '.join(keys)}",
    ]


@contextmanager
def explaining_memory(context: RunContext, state: TrainState) -> Iterator[None]:
    """Context that reports a failed allocation to standard error and to a log file, and raises the error again."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            with suppress(Exception):  # a failure of the report must not hide the error
                _report(context, state)
        raise


def _report(context: RunContext, state: TrainState) -> None:
    logs, rank = context.config.run.dir / LOGS_DIR, state.mesh.rank
    report = lines(state, context.plan)
    for line in report:
        print_line(line)
    logs.mkdir(parents=True, exist_ok=True)
    (logs / f"memory-rank-{rank}.txt").write_text("\n".join(report) + "\n", encoding="utf-8")
    snapshot = logs / f"memory-rank-{rank}.pickle"
    if state.backend.diagnostics.dump_memory(snapshot):
        print_line(f"rank {rank}: {snapshot} has every block of the device's memory; pytorch.org/memory_viz shows it")


def _planned_activations(state: TrainState, plan: Resolved) -> int:
    config, mesh = plan.config, state.mesh
    parallel = config.parallel.model_copy(update={"dp": mesh.dp_size})
    job = Job(
        plan.dimensions,
        MACHINES.get(config.cluster.instance, MACHINES[PLANNED_AS]),
        config.cluster.nodes,
        config.model_copy(update={"parallel": parallel}),
    )
    planned = stage_bytes(job, mesh.pp.rank)
    return planned.activations + planned.logits


class _Count:
    """Counter of the bytes of tensors, which counts each storage once.

    Tensors of a lazy device have no address, and share no storage.
    """

    def __init__(self, *, lazy: bool) -> None:
        self._lazy = lazy
        self._seen = set[int]()

    def bytes(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the tensors whose storage was not counted before."""
        total = 0
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            key = id(local) if self._lazy else local.untyped_storage().data_ptr()
            if local.numel() and key not in self._seen:
                self._seen.add(key)
                total += local.numel() * local.element_size()
        return total
