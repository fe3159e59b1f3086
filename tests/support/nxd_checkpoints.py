"""NeuronX Distributed's own `save_checkpoint` and `load_checkpoint` on gloo, for its example's Llama."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from nxtrain.backends.base import Backend
from tests.support import nxd_golden
from tests.support.nxd_cpu import PLATFORM
from tests.support.nxd_golden import GLOBAL_BATCH, OPTIM, Case, token_rows
from tests.support.nxd_oracle import _load_example, _model, _prepare
from tests.support.nxd_stages import micro_rows, pipeline_batch, pipeline_config

TAG = "step_1"


class Seen(NamedTuple):
    """Scores and weights of a rank."""

    logits: Tensor | None
    weights: Mapping[str, Tensor]
    means: Mapping[str, Tensor]
    user_content: Any = None


@contextmanager
def sized(case: Case) -> Iterator[None]:
    """Give the golden model a vocabulary that the ranks of a case divide."""
    nxd_golden.weights.cache_clear()
    with patch.dict(nxd_golden.MODEL, vocab_size=130 if case.tp <= 2 else 132):
        yield
    nxd_golden.weights.cache_clear()


def rows() -> Tensor:
    """(sequences, length) tokens."""
    return torch.from_numpy(token_rows().astype("int64"))[:GLOBAL_BATCH]


def train_and_save(backend: Backend, case: Case, example: Path, folder: Path, platform: str, use_xser: bool) -> Seen:
    """One update, then a checkpoint."""
    with sized(case), _opened(backend, case, example, platform) as (nxd, model, optimizer, names):
        from neuronx_distributed.parallel_layers import parallel_state

        mine = rows().chunk(case.dp)[parallel_state.get_data_parallel_rank()]
        if case.pp > 1:
            model.run_train(**pipeline_batch(case, mine))
        else:
            inputs, labels = micro_rows(mine)
            model(input_ids=inputs, attention_mask=None, labels=labels).loss.backward()
        optimizer.step()
        _save(nxd, folder, model, optimizer, use_xser)
        return _seen(case, model, optimizer, names)


def load(backend: Backend, case: Case, example: Path, folder: Path, platform: str, again: Path) -> Seen:
    """Load the newest checkpoint into a model of other weights, and save it as NxD does."""
    with sized(case), _opened(backend, case, example, platform) as (nxd, model, optimizer, names):
        with torch.no_grad():
            for parameter in _parameters(case, model).values():
                parameter.fill_(7.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        content = nxd.load_checkpoint(str(folder), model=model, optimizer=optimizer, scheduler=scheduler)
        _save(nxd, again, model, optimizer, use_xser=False)
        return _seen(case, model, optimizer, names)._replace(user_content=(content, scheduler.last_epoch))


def _save(nxd: Any, folder: Path, model: Any, optimizer: Any, use_xser: bool) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    content = {"total_steps": 1, "batch_idx": 0, "epoch": 0, "cli_args": {"lr": 1.0}}
    nxd.save_checkpoint(str(folder), TAG, model, optimizer, scheduler, content, use_xser=use_xser)


@contextmanager
def _opened(backend: Backend, case: Case, example: Path, platform: str) -> Iterator[tuple[Any, Any, Any, list[str]]]:
    os.environ[PLATFORM] = platform
    if backend.world == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _prepare()
    import neuronx_distributed as nxd
    import neuronx_distributed.trainer.checkpoint as module
    from neuronx_distributed.parallel_layers import parallel_state

    module.g_iostate = None
    mixed = {"mixed_precision_config": {"use_master_weights": True, "use_master_weights_in_ckpt": True}}
    config = nxd.neuronx_distributed_config(
        tensor_parallel_size=case.tp,
        pipeline_parallel_size=case.pp,
        pipeline_config=pipeline_config(case, _load_example(example)) if case.pp > 1 else None,
        optimizer_config={"zero_one_enabled": case.zero1, "grad_clipping": True, "max_grad_norm": case.clip},
        sequence_parallel=case.sequence_parallel,
        **(mixed if case.params == "bf16" else {}),
    )
    try:
        model = nxd.initialize_parallel_model(config, lambda: _model(case, example))
        named = _parameters(case, model)
        decayed = [name for name in named if "norm" not in name]
        plain = [name for name in named if "norm" in name]
        groups = [
            {"params": [named[name] for name in decayed], "weight_decay": OPTIM["weight_decay"]},
            {"params": [named[name] for name in plain], "weight_decay": 0.0},
        ]
        optimizer = nxd.initialize_parallel_optimizer(config, torch.optim.AdamW, groups, **OPTIM)
        yield nxd, model, optimizer, [*decayed, *plain]
    finally:
        parallel_state.destroy_kv_group()
        parallel_state.destroy_model_parallel()
        del os.environ[PLATFORM]
        if backend.world == 1:
            dist.destroy_process_group()


def _parameters(case: Case, model: Any) -> dict[str, torch.nn.Parameter]:
    return dict(model.local_named_parameters() if case.pp > 1 else model.named_parameters())


@torch.no_grad()
def _seen(case: Case, model: Any, optimizer: Any, names: list[str]) -> Seen:
    logits = None
    if case.pp == 1:
        inputs, _ = micro_rows(rows())
        logits = model(input_ids=inputs, attention_mask=None).logits.float()
    state = optimizer.state_dict()
    state = state["base_state"] if case.zero1 else state["state"]
    means = {name: state[number]["exp_avg"].clone() for number, name in enumerate(names)}
    weights = {name: parameter.detach().clone() for name, parameter in _parameters(case, model).items()}
    return Seen(logits, weights, means)
