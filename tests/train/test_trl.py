"""Losses, gradients and metrics of DPO, ORPO and KTO on a tiny model are those of TRL's trainers.

TRL needs Python 3.11 and a newer transformers than NeuronX Distributed; `scripts/setup.sh` installs it elsewhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nxtrain.backends import open_backend
from nxtrain.common.vocab import END_BIT, IGNORE_INDEX, PROMPT_BIT
from nxtrain.config.check import Resolved
from nxtrain.config.finetune_schema import FinetuneConfig
from nxtrain.data.loader import Batch, swap_answers
from nxtrain.nn.lora import is_adapter
from nxtrain.train.step import TrainState, answer_log_probs, train_step
from nxtrain.train.trainer import on_device
from tests.support.conversations import FAMILIES, VOCABULARY, write_family
from tests.support.labelled import Judged, other_answers, rows_of_judged
from tests.support.lora import adapted, adapters_of, our_name
from tests.support.models import changed, hf_model, weights_of
from tests.support.pairs import batch_of_pairs
from tests.support.parity import gradient, layout, relative_errors, start, whole

pytest.importorskip("trl", reason="no trl: it needs Python 3.11 and transformers 4.56")

BOUND = 1e-5

Pair = tuple[list[int], list[int], list[int]]
"""Ids of a prompt, of the chosen and of the rejected answer."""


@contextmanager
def quiet() -> Iterator[None]:
    """TRL and what it imports warn of their own future."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def drawn_pairs(rng: Random, number: int, prompt_tokens: int = 0) -> list[Pair]:
    def ids(size: int) -> list[int]:
        return [rng.randrange(1, VOCABULARY) for _ in range(size)]

    return [
        (ids(prompt_tokens or rng.randint(1, 5)), ids(rng.randint(1, 6)), ids(rng.randint(1, 6))) for _ in range(number)
    ]


def rows_of(pairs: Sequence[Pair], seq_len: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Marked rows, each of two pairs."""
    rows = []
    for first in range(0, len(pairs), 2):
        row: list[int] = []
        for prompt, *answers in pairs[first : first + 2]:
            for answer in answers:
                row += [*(token | PROMPT_BIT for token in prompt), *answer[:-1], answer[-1] | END_BIT]
        rows.append(row + [IGNORE_INDEX] * (seq_len + 1 - len(row)))
    return np.array(rows, np.int64)


def run_of(method: str, objective: str, rows: int) -> Resolved:
    resolved = layout("gqa2", tp=1, batch=rows, micro=1, seq_len=48, config={"vocab_size": VOCABULARY})
    finetune = {"method": method, "objective": objective, "beta": 0.3, "orpo_lambda": 0.7, "pairs_per_row": 2}
    return changed(resolved, finetune={**finetune, "r": 4, "alpha": 8.0}, data={"doc_mask": True})


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {our_name(name) if "lora_" in name else name: grad for name, grad in grads.items()}


def dpo_trainer(folder: Path, model: Any, reference: Any, beta: float) -> Any:
    with quiet():
        from datasets import Dataset
        from trl.trainer.dpo_config import DPOConfig
        from trl.trainer.dpo_trainer import DPOTrainer

        tokenizer = write_family(folder / "tokenizer", FAMILIES["chatml"])
        tokenizer.pad_token = tokenizer.eos_token
        rows = Dataset.from_list([{"prompt": "snow", "chosen": " and", "rejected": " end"}])
        args = DPOConfig(str(folder / "trl"), beta=beta, report_to="none", use_cpu=True, bf16=False,
                         gradient_checkpointing=False)  # fmt: skip
        return DPOTrainer(model, reference, args, train_dataset=rows, processing_class=tokenizer)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_dpo_has_the_loss_the_gradients_and_the_metrics_of_trl(method: str, tmp_path: Path) -> None:
    pairs, resolved = drawn_pairs(Random(3), 6), run_of(method, "dpo", 3)
    base = weights_of(resolved)
    weights = {**base, **adapters_of(resolved, base)} if method == "lora" else base
    model: Any = hf_model(resolved, weights=base)
    reference: Any = None
    first = {name: tensor + 0.02 * torch.randn_like(tensor) for name, tensor in base.items()}
    if method == "lora":
        model = adapted(resolved, model)
    else:
        reference = hf_model(resolved, weights=first)
    trainer = dpo_trainer(tmp_path, model, reference, resolved.config.finetune.beta)
    trainer.model.eval()
    # TRL takes a copy of the first adapter as the reference, which is the base while the adapter is new.
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad and method == "lora":
                parameter.copy_(weights[our_name(name)])
    with quiet():
        from trl.trainer.dpo_trainer import DataCollatorForPreference

        examples = [dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), pair, strict=True)) for pair in pairs]
        loss = trainer.compute_loss(trainer.model, DataCollatorForPreference(0)(examples))
        loss.backward()
    metrics = trainer._metrics["eval"]

    backend = open_backend("cpu")
    batch = batch_of_pairs(rows_of(pairs, 48), 1, 2)
    if method == "full":
        of_reference = start(backend, resolved, first)
        batch = with_log_probs(of_reference, batch)
    state = start(backend, resolved, weights)
    ours = gradient(state, on_device(state, batch))
    assert ours.loss == pytest.approx(loss.item(), abs=BOUND)
    assert max(relative_errors(whole([ours.shards], resolved), gradients_of(trainer.model)).values()) < BOUND
    result = train_step(state, on_device(state, batch), 1e-3)
    assert state.preferences is not None
    means = state.preferences.means(backend.fetch({"pairs": result.num_tokens, **result.others}))
    assert means["pairs"] == len(pairs)
    for key, theirs in (
        ("reward_chosen", "rewards/chosen"),
        ("reward_rejected", "rewards/rejected"),
        ("reward_accuracy", "rewards/accuracies"),
        ("reward_margin", "rewards/margins"),
    ):
        assert means[key] == pytest.approx(metrics[theirs][-1], abs=BOUND), key


def orpo_batch(pairs: Sequence[Pair]) -> dict[str, Tensor]:
    """Batch of TRL's collator: padded ids, masks and labels of both answers."""
    batch: dict[str, Tensor] = {}
    for side, name in enumerate(("chosen", "rejected"), 1):
        width = max(len(pair[0]) + len(pair[side]) for pair in pairs)
        columns: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
        for pair in pairs:
            prompt, answer = pair[0], pair[side]
            rest = width - len(prompt) - len(answer)
            columns["input_ids"].append([*prompt, *answer, *[0] * rest])
            columns["attention_mask"].append([1] * (width - rest) + [0] * rest)
            columns["labels"].append([-100] * len(prompt) + answer + [-100] * rest)
        batch |= {f"{name}_{column}": torch.tensor(values) for column, values in columns.items()}
    return batch


def orpo_trainer(folder: Path, model: Any, weight: float) -> Any:
    with quiet():
        from datasets import Dataset
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        tokenizer = write_family(folder / "tokenizer", FAMILIES["chatml"])
        tokenizer.pad_token = tokenizer.eos_token
        rows = Dataset.from_list([{"prompt": "snow", "chosen": " and", "rejected": " end"}])
        args = ORPOConfig(str(folder / "trl"), beta=weight, report_to="none", use_cpu=True, bf16=False,
                          gradient_checkpointing=False, max_length=64)  # fmt: skip
        return ORPOTrainer(model, args, train_dataset=rows, processing_class=tokenizer)


def test_orpo_has_the_loss_the_gradients_and_the_metrics_of_trl(tmp_path: Path) -> None:
    """TRL's likelihood counts prompts and pads micro-batches together, so each pair is alone, after one token."""
    pairs, resolved = drawn_pairs(Random(4), 4, prompt_tokens=1), run_of("full", "orpo", 2)
    base = weights_of(resolved)
    trainer = orpo_trainer(tmp_path, hf_model(resolved, weights=base), resolved.config.finetune.orpo_lambda)
    trainer.model.eval()
    losses, metrics = [], []
    with quiet():
        for pair in pairs:
            loss, actual = trainer.get_batch_loss_metrics(trainer.model, orpo_batch([pair]))
            (loss / len(pairs)).backward()
            losses.append(loss.item())
            metrics.append(actual)
    backend = open_backend("cpu")
    state = start(backend, resolved, base)
    batch = on_device(state, batch_of_pairs(rows_of(pairs, 48), 1, 2))
    ours = gradient(state, batch)
    assert ours.loss == pytest.approx(sum(losses) / len(losses), abs=BOUND)
    assert max(relative_errors(whole([ours.shards], resolved), gradients_of(trainer.model)).values()) < BOUND
    result = train_step(state, batch, 1e-3)
    assert state.preferences is not None
    means = state.preferences.means(backend.fetch({"pairs": result.num_tokens, **result.others}))
    for key, theirs in (("reward_chosen", "rewards/chosen"), ("reward_accuracy", "rewards/accuracies")):
        assert means[key] == pytest.approx(sum(metric[theirs] for metric in metrics) / len(pairs), abs=BOUND), key


def kto_trainer(folder: Path, model: Any, reference: Any, config: FinetuneConfig) -> Any:
    with quiet():
        from datasets import Dataset
        from trl.trainer.kto_config import KTOConfig
        from trl.trainer.kto_trainer import KTOTrainer

        tokenizer = write_family(folder / "tokenizer", FAMILIES["chatml"])
        tokenizer.pad_token = tokenizer.eos_token
        rows = Dataset.from_list([{"prompt": "snow", "completion": " and", "label": label} for label in (True, False)])
        weights = {name: getattr(config, name) for name in ("beta", "desirable_weight", "undesirable_weight")}
        args = KTOConfig(str(folder / "trl"), **weights, report_to="none", use_cpu=True, bf16=False,
                         gradient_checkpointing=False, per_device_train_batch_size=2)  # fmt: skip
        return KTOTrainer(model, reference, args, train_dataset=rows, processing_class=tokenizer)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_kto_has_the_loss_the_gradients_and_the_metrics_of_trl(method: str, tmp_path: Path) -> None:
    """One batch of TRL, whose other answers are those of `swap_answers`; ours are two rows of micro-batches of one."""
    rng, resolved = Random(6), run_of(method, "kto", 2)
    resolved = changed(resolved, finetune={"desirable_weight": 1.3, "undesirable_weight": 0.8})
    judged = [[Judged(tuple(a), tuple(b), rng.random() < 0.5) for a, b, _ in drawn_pairs(rng, 4)] for _ in range(2)]
    base = weights_of(resolved)
    weights = {**base, **adapters_of(resolved, base)} if method == "lora" else base
    model: Any = hf_model(resolved, weights=base)
    generator = torch.Generator().manual_seed(1)
    first = {name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator) for name, tensor in base.items()}
    reference = None if method == "lora" else hf_model(resolved, weights=first)
    if method == "lora":
        model = adapted(resolved, model)
    trainer = kto_trainer(tmp_path, model, reference, resolved.config.finetune)
    trainer.model.eval()
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad and method == "lora":
                parameter.copy_(weights[our_name(name)])
    examples = []
    for row, others in zip(judged, other_answers(judged), strict=True):
        for answer, other in zip(row, others, strict=True):
            ids = {"prompt_ids": answer.prompt, "completion_ids": answer.answer, "KL_completion_ids": other.answer}
            examples.append({**{name: [*value] for name, value in ids.items()}, "label": answer.is_desirable})
    with quiet():
        from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

        loss = trainer.compute_loss(trainer.model, DataCollatorForUnpairedPreference(0)(examples))
        loss.backward()
    metrics = trainer._metrics["eval"]

    backend, rows = open_backend("cpu"), rows_of_judged(judged, 48)
    batch = batch_of_pairs(rows, 1, 2, labelled=True)
    batch = replace(batch, swapped=batch_of_pairs(swap_answers(rows), 1, 2, labelled=True))
    if method == "full":
        of_reference = start(backend, resolved, first)
        batch = with_log_probs(of_reference, replace(batch, swapped=with_log_probs(of_reference, batch.swapped)))
    state = start(backend, resolved, weights)
    ours = gradient(state, on_device(state, batch))
    assert ours.loss == pytest.approx(loss.item(), abs=BOUND)
    assert max(relative_errors(whole([ours.shards], resolved), gradients_of(trainer.model)).values()) < BOUND
    result = train_step(state, on_device(state, batch), 1e-3)
    assert state.preferences is not None
    means = state.preferences.means(backend.fetch({"answers": result.num_tokens, **result.others}))
    assert means["answers"] == 8 and metrics["kl"][-1] > 0
    for key, theirs in (
        ("reward_chosen", "rewards/chosen"),
        ("reward_rejected", "rewards/rejected"),
        ("reward_margin", "rewards/margins"),
        ("kl", "kl"),
    ):
        assert means[key] == pytest.approx(metrics[theirs][-1], abs=2 * BOUND), key


def with_log_probs(state: TrainState, batch: Batch | None) -> Batch:
    """Batch with the log-probabilities of its answers by a model as the reference."""
    assert batch is not None and batch.answers is not None
    found = torch.stack(answer_log_probs(state, on_device(state, batch))).numpy()
    return replace(batch, answers=replace(batch.answers, reference=found))


def test_the_frozen_base_is_the_reference_bit_for_bit() -> None:
    """The same step with the adapters off, and a second copy of the base."""
    resolved = run_of("lora", "dpo", 3)
    base = weights_of(resolved)
    backend, batch = open_backend("cpu"), batch_of_pairs(rows_of(drawn_pairs(Random(5), 6), 48), 1, 2)
    state = start(backend, resolved, {**base, **adapters_of(resolved, base)})
    copy = start(backend, changed(resolved, finetune={"method": "full"}), base)
    given = torch.stack(answer_log_probs(copy, on_device(copy, batch)))
    own = torch.stack(answer_log_probs(state, on_device(state, batch)))
    assert not torch.equal(given, own), "adapters that change nothing prove nothing"
    assert batch.answers is not None
    stored = replace(batch, answers=replace(batch.answers, reference=given.numpy()))
    by_base, by_copy = (gradient(state, on_device(state, item)) for item in (batch, stored))
    assert (by_base.loss, by_base.norm) == (by_copy.loss, by_copy.norm)
    assert {name for name in by_base.shards if is_adapter(name)} == by_base.shards.keys()
    assert all(torch.equal(by_base.shards[name], by_copy.shards[name]) for name in by_base.shards)
