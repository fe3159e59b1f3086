"""NeuronX Distributed and its own example Llama, trained on gloo: what the golden courses are recorded from.

Its CPU mode reaches its layers, but not its trainer, its module for grouped queries or its ZeRO-1 optimizer, which call
torch-xla. Here those calls go to gloo as well. The arithmetic stays NeuronX Distributed's own.

Source: https://github.com/aws-neuron/neuronx-distributed, examples/training/llama.
"""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nxtrain.backends.base import Backend
from tests.support import nxd_cpu
from tests.support.nxd_golden import GLOBAL_BATCH, MODEL, OPTIM, VERSION, Case, Course, token_rows, weights
from tests.support.nxd_stages import layer_list, micro_rows, pipeline_batch, pipeline_config


def train(backend: Backend, case: Case, example: Path) -> Course:
    """Train NeuronX Distributed's Llama as its scripts do, on this rank of a gloo world."""
    if backend.world == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _prepare()
    import neuronx_distributed as nxd
    from neuronx_distributed._version import __version__ as version
    from neuronx_distributed.parallel_layers import parallel_state

    assert version == VERSION, f"the golden courses are of NeuronX Distributed {VERSION}; this is {version}"
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=case.tp,
        pipeline_parallel_size=case.pp,
        pipeline_config=pipeline_config(case, _load_example(example)) if case.pp > 1 else None,
        optimizer_config={"zero_one_enabled": case.zero1, "grad_clipping": True, "max_grad_norm": case.clip},
        sequence_parallel=case.sequence_parallel,
    )
    try:
        model = nxd.initialize_parallel_model(config, lambda: _model(case, example))
        decayed = [p for name, p in model.named_parameters() if "norm" not in name]
        plain = [p for name, p in model.named_parameters() if "norm" in name]
        groups = [
            {"params": decayed, "weight_decay": OPTIM["weight_decay"]},
            {"params": plain, "weight_decay": 0.0},
        ]
        optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, groups, **OPTIM)
        return _steps(model, optimizer, case)
    finally:
        parallel_state.destroy_kv_group()
        parallel_state.destroy_model_parallel()
        if backend.world == 1:
            dist.destroy_process_group()


def _steps(model: Any, optimizer: Any, case: Case) -> Course:
    import torch_xla.core.xla_model as xm
    from neuronx_distributed.parallel_layers import parallel_state

    dp_rank = parallel_state.get_data_parallel_rank()
    losses, norms = [], []
    for batch in torch.from_numpy(token_rows().astype("int64")).split(GLOBAL_BATCH):
        mine = batch.chunk(case.dp)[dp_rank]
        if case.pp > 1:
            losses.append(model.run_train(**pipeline_batch(case, mine)).item())
        else:
            running = torch.zeros(1, dtype=torch.double)
            for rows in mine.split(case.micro_batch):
                inputs, labels = micro_rows(rows)
                loss = model(input_ids=inputs, attention_mask=None, labels=labels).loss / case.accumulation
                loss.backward()
                running += loss.detach()
            groups = parallel_state.get_data_parallel_replica_groups()
            losses.append(xm.all_reduce(xm.REDUCE_SUM, running / case.dp, groups=groups).item())
        optimizer.step()
        norms.append(optimizer.grad_norm.item())
        optimizer.zero_grad()
    return Course(losses, norms)


def _model(case: Case, example: Path) -> nn.Module | list[nn.Module]:
    """The example's Llama with this rank's part of the golden weights."""
    import transformers
    from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_rank

    config = transformers.LlamaConfig(
        **MODEL,
        use_cache=False,
        tie_word_embeddings=case.tied,
        sequence_parallel_enabled=case.sequence_parallel,
        selective_checkpoint_enabled=False,
        qkv_linear=case.qkv != "separate",
        fuse_qkv=case.qkv == "grouped_fused",
        kv_shared_group_size=case.kv_size_multiplier,
        use_flash_attention=False,
        transpose_nki_inputs=False,
        torch_dtype=torch.bfloat16 if case.params == "bf16" else torch.float32,
    )
    model: nn.Module = _load_example(example).LlamaForCausalLM(config).to(config.torch_dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_shard(name, parameter, case, get_tensor_model_parallel_rank()))
    for module in model.modules():
        if hasattr(module, "sequence_parallel_enabled"):
            module.register_full_backward_pre_hook(_contiguous)
    return layer_list(model, case) if case.stages == "manual" else model


def _shard(name: str, parameter: nn.Parameter, case: Case, rank: int) -> Tensor:
    """A rank's part of a parameter of the example."""
    if parameter.dim() == 1:
        return weights()[name]
    module, _, leaf = name.rpartition(".")
    block, _, layer = module.rpartition(".")
    sources = {"gate_up_proj": ["gate_proj", "up_proj"], "qkv_proj": _PROJECTIONS.get(leaf, [])}.get(layer, [layer])
    dim = 1 if layer in ("o_proj", "down_proj") else 0
    wholes = [_whole(f"{block}.{source}.weight".removeprefix("."), case) for source in sources]
    return torch.cat([whole.chunk(case.tp, dim)[rank] for whole in wholes])


_PROJECTIONS = {
    "weight_q": ["q_proj"],
    "weight_k": ["k_proj"],
    "weight_v": ["v_proj"],
    "weight_qkv": ["q_proj", "k_proj", "v_proj"],
}
"""By the names of the module for grouped queries."""


def _whole(name: str, case: Case) -> Tensor:
    """A whole weight, K/V heads copied, and the queries of each head dealt out to the ranks that have a copy."""
    x = weights()[name]
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        return x.repeat(case.kv_size_multiplier, 1)
    if name.endswith(("q_proj.weight", "o_proj.weight")):
        dim = int(name.endswith("o_proj.weight"))
        heads: Tensor = x.unflatten(dim, (MODEL["num_key_value_heads"], case.kv_size_multiplier, -1))
        return heads.transpose(dim, dim + 1).flatten(dim, dim + 2)
    return x


def _contiguous(module: nn.Module, grads: Sequence[Tensor] | Tensor) -> tuple[Tensor, ...]:
    # The backward functions take views of gradients, which on XLA, without strides, any tensor allows.
    return tuple(grad.contiguous() for grad in ([grads] if isinstance(grads, Tensor) else grads))


def _load_example(path: Path) -> types.ModuleType:
    """Import the example's model, whose causal mask is made for an XLA device."""
    if path.stem not in sys.modules:
        source = _edited(path.read_text(encoding="utf-8"), 'device="xla"', "device=query_states.device")
        module = types.ModuleType(path.stem)
        sys.modules[path.stem] = module
        exec(compile(source, str(path), "exec"), vars(module))
    return sys.modules[path.stem]


def _prepare() -> None:
    """Make NeuronX Distributed trainable in this process, whose process group is open."""
    first = "neuronx_distributed" not in sys.modules
    if first:
        nxd_cpu.prepare()
    import torch_xla.core.xla_env_vars as xenv
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.zero_redundancy_optimizer as zero1
    import torch_xla.runtime as xr

    if first:
        sharded = zero1.ZeroRedundancyOptimizer
        sharded._shard_parameters = _recompiled(sharded._shard_parameters, "assert self.device.type == 'xla'", "pass")
    comm = _Gloo()
    world, rank = dist.get_world_size(), dist.get_rank()
    xm.xla_device = lambda: torch.device("cpu")
    xm.mark_step = xm.unlazy = lambda *_: None
    xm.rendezvous = lambda _: dist.barrier()
    xm.all_reduce, xm.all_gather, xm.reduce_scatter = comm.all_reduce, comm.all_gather, comm.reduce_scatter
    xm.reduce_scatter_bucketized, xm.all_gather_bucketized = comm.reduce_scatter, comm.all_gather
    xr.global_ordinal = xr.local_ordinal = lambda: rank
    xr.global_device_count = xr.world_size = xr.local_process_count = lambda: world
    # It divides the world by the number of machines, which torch-xla 2.9 no longer names.
    xenv.HOST_WORLD_SIZE = "HOST_WORLD_SIZE"
    os.environ["HOST_WORLD_SIZE"] = "1"

    from neuronx_distributed.parallel_layers import grads

    # The norm under ZeRO-1 goes over replica groups, for which the CPU mode expects a process group.
    grads.all_reduce = comm.all_reduce


class _Gloo:
    """torch-xla's collectives between processes; replica groups become process groups when they are first used."""

    def __init__(self) -> None:
        self._groups: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}

    def all_reduce(self, kind: str, x: Any, scale: float = 1.0, groups: Any = None, **_: Any) -> Any:
        """Sum a tensor into a new one, or a list of them in place."""
        if isinstance(x, Tensor):
            (x,) = self.all_reduce(kind, [x.clone()], scale, groups)
            return x
        for tensor in x:
            dist.all_reduce(tensor, _KINDS[kind], group=self._group(groups))
            tensor.mul_(scale)
        return x

    def all_gather(self, x: Any, dim: int = 0, groups: Any = None, **_: Any) -> Any:
        """Put together what the ranks have."""
        if not isinstance(x, Tensor):
            return [self.all_gather(tensor, dim, groups) for tensor in x]
        group = self._group(groups)
        parts = [torch.empty(x.shape, dtype=x.dtype) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    def reduce_scatter(
        self,
        kind: str,
        x: Any,
        scale: float,
        scatter_dim: int,
        shard_count: int,
        groups: Any = None,
        output: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """This rank's part of the sum, also written to `output` if that is given."""
        if not isinstance(x, Tensor):
            return [self.reduce_scatter(kind, tensor, scale, scatter_dim, shard_count, groups) for tensor in x]
        parts = self.all_reduce(kind, x, scale, groups).chunk(shard_count, scatter_dim)
        part = parts[self._group(groups).rank()]
        return part.contiguous() if output is None else output.copy_(part)

    def _group(self, groups: Any) -> dist.ProcessGroup:
        if isinstance(groups, dist.ProcessGroup):
            return groups
        mesh = tuple(tuple(int(rank) for rank in group) for group in groups)
        if mesh not in self._groups:
            self._groups[mesh], _ = dist.new_subgroups_by_enumeration([list(group) for group in mesh])
        return self._groups[mesh]


_KINDS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _recompiled(function: Callable[..., Any], old: str, new: str) -> Any:
    """A function with one line of its source replaced."""
    scope: dict[str, Any] = {}
    source = _edited(textwrap.dedent(inspect.getsource(function)), old, new)
    exec(compile(source, inspect.getfile(function), "exec"), function.__globals__, scope)
    return scope[function.__name__]


def _edited(source: str, old: str, new: str) -> str:
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times where once was expected"
    return source.replace(old, new)
