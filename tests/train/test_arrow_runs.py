"""Runs on a prepared corpus that is tokenized and packed during training: any stop, and any ranks, same losses."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from nxtrain.backends.base import Backend
from nxtrain.checkpoint.meta import read_meta
from nxtrain.common.errors import CheckpointError, DataError
from nxtrain.common.vocab import IGNORE_INDEX
from nxtrain.config.check import Resolved
from nxtrain.data.loader import Batch
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.trainer import Trainer
from tests.support.corpora import documents, prepare, write_corpus, write_tokenizer
from tests.support.models import changed
from tests.support.ranks import RankPool
from tests.support.runs import GLOBAL_BATCH, SEQ_LEN, course, records, run_plan, token_file, train_rank

STEPS, VOCABULARY = 6, 300
PACKINGS = ("concat", "best_fit")


def train_and_count(backend: Backend, resolved: Resolved) -> list[int]:
    """One rank of a run; the targets of its batches, in the order of the steps."""
    counts: list[int] = []
    put = Trainer._put

    def counted(self: Trainer, batch: Batch) -> DeviceBatch:
        counts.append(int((batch.targets != IGNORE_INDEX).sum()))
        return put(self, batch)

    with patch.object(Trainer, "_put", counted):
        train_rank(backend, resolved)
    return counts


def train_eagerly(backend: Backend, resolved: Resolved) -> None:
    """One rank of a run whose blocks are traced as for a compiler, and run without one."""
    torch._dynamo.reset()
    with patch.object(backend, "compiler", "aot_eager"):
        train_rank(backend, resolved)


class Runs:
    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.corpus = folder / "corpus.arrow"
        prepare(write_corpus(folder / "src", "a.jsonl", documents(40)), out=self.corpus)
        self.tokenizer = write_tokenizer(folder / "tokenizer", VOCABULARY)
        self.straight = cache(lambda packing: self.run(self.plan(f"straight-{packing}", packing, STEPS)))

    def plan(self, name: str, packing: str, steps: int, dp: int = 1, **sections: dict[str, Any]) -> Resolved:
        data: dict[str, Any] = {"source": "arrow", "path": str(self.corpus), "packing": packing, "workers": 0}
        data["tokenizer"] = str(self.tokenizer)
        return run_plan(
            self.folder / name,
            data,
            steps=steps,
            parallel={"tp": 1, "dp": dp},
            model={"config": {"vocab_size": VOCABULARY}},
            optim={"decay_steps": STEPS, "warmup_steps": 2},
            checkpoint={"every": 2, "async": False},
            **sections,
        )

    def run(self, resolved: Resolved) -> Path:
        self.ranks.run(resolved.config.parallel.dp, train_rank, resolved)
        return resolved.config.run.dir


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(("packing", "stop"), [("concat", 3), ("best_fit", 1), ("best_fit", 5)])
def test_going_on_after_any_step_is_the_straight_run(runs: Runs, packing: str, stop: int) -> None:
    name = f"{packing}-{stop}"
    runs.run(runs.plan(name, packing, stop))
    broken = runs.run(runs.plan(name, packing, STEPS))
    assert course(broken) == course(runs.straight(packing))


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("doc_mask", [False, True])
def test_a_record_tells_the_targets_that_count_from_the_positions(runs: Runs, doc_mask: bool, dp: int) -> None:
    resolved = changed(runs.plan(f"counted-{doc_mask}-{dp}", "best_fit", 9, dp), data={"doc_mask": doc_mask})
    counts = runs.ranks.run(dp, train_and_count, resolved)
    lines = records(resolved.config.run.dir)
    assert [line["targets"] for line in lines] == [sum(of_ranks) for of_ranks in zip(*counts, strict=True)]
    assert min(line["targets"] for line in lines) < GLOBAL_BATCH * SEQ_LEN, "rows of best_fit have free positions"
    assert [line["tokens"] for line in lines] == [line["step"] * GLOBAL_BATCH * SEQ_LEN for line in lines]


@pytest.mark.parametrize("packing", PACKINGS)
def test_one_two_and_again_one_rank_train_on_the_rows_of_one(runs: Runs, packing: str) -> None:
    straight, name = runs.straight(packing), f"elastic-{packing}"
    for steps, dp in ((2, 1), (4, 2), (STEPS, 1)):
        folder = runs.run(runs.plan(name, packing, steps, dp))
    for ours, theirs in zip(records(folder), records(straight), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-6)
    metas = [read_meta(item / "checkpoints" / f"step-{STEPS:08d}") for item in (folder, straight)]
    assert metas[0].data_cursor == metas[1].data_cursor
    assert len(metas[0].data_cursor["places"]) == GLOBAL_BATCH


@pytest.mark.parametrize("remat", ["none", "full"])
def test_masks_between_documents_change_the_losses_and_no_rows(runs: Runs, remat: str) -> None:
    train = {"remat": remat, "eval_every": 3, "eval_batches": 1}
    data = {"doc_mask": True, "validation_fraction": 0.3}
    masked = runs.run(changed(runs.plan(f"masked-{remat}", "best_fit", 3, train=train), data=data))
    plain = runs.run(changed(runs.plan(f"plain-{remat}", "best_fit", 3, train=train), data={**data, "doc_mask": False}))
    metas = [read_meta(folder / "checkpoints" / "step-00000003").data_cursor for folder in (masked, plain)]
    assert metas[0] == metas[1]
    for ours, theirs in zip(records(masked), records(plain), strict=True):
        assert 0 < abs(ours["loss"] - theirs["loss"]) < 1
    assert records(masked)[-1]["val_loss"] != records(plain)[-1]["val_loss"]


def test_workers_change_no_number(runs: Runs) -> None:
    resolved = changed(runs.plan("workers", "best_fit", STEPS), data={"workers": 3})
    assert course(runs.run(resolved)) == course(runs.straight("best_fit"))


def test_a_mixture_goes_on_from_any_step_at_any_ranks_and_records_its_corpora(runs: Runs) -> None:
    prepare(write_corpus(runs.folder / "more", "a.jsonl", documents(60)[40:]), out=runs.folder / "more.arrow")
    data = {"path": "", "mixture": (str(runs.corpus), str(runs.folder / "more.arrow")), "weights": (3.0, 1.0)}
    straight = runs.run(changed(runs.plan("mixed", "concat", STEPS), data=data))
    for steps, dp in ((3, 2), (STEPS, 1)):
        broken = runs.run(changed(runs.plan("mixed-broken", "concat", steps, dp), data=data))
    for ours, theirs in zip(records(broken), records(straight), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-6)
        assert [ours[key] for key in sorted(ours) if "/" in key] == [theirs[key] for key in sorted(ours) if "/" in key]
        rows = GLOBAL_BATCH * ours["step"]
        assert [ours["tokens/corpus"], ours["tokens/more"]] == [rows * 3 // 4 * SEQ_LEN, rows // 4 * SEQ_LEN]
        assert ours["tokens/corpus"] + ours["tokens/more"] == ours["tokens"]
    assert records(straight)[-1]["epochs/more"] > records(straight)[0]["epochs/more"]
    metas = [read_meta(item / "checkpoints" / f"step-{STEPS:08d}") for item in (broken, straight)]
    assert metas[0].data_cursor == metas[1].data_cursor
    with pytest.raises(AssertionError, match=f"{CheckpointError.__name__}: .*the data's fingerprint is"):
        runs.run(changed(runs.plan("mixed", "concat", STEPS + 1), data={**data, "weights": (1.0, 1.0)}))


def test_a_mixture_of_token_files_goes_on_and_records_its_corpora(runs: Runs) -> None:
    files = [str(token_file(runs.folder / f"{name}.npy", rows, seed=rows)) for name, rows in (("a", 30), ("b", 7))]
    data = {"source": "tokens", "tokenizer": "", "path": "", "mixture": tuple(files), "weights": (0.5, 1.5)}
    straight = runs.run(changed(runs.plan("tokens", "concat", STEPS), data=data))
    for steps in (3, STEPS):
        broken = runs.run(changed(runs.plan("tokens-broken", "concat", steps), data=data))
    assert course(broken) == course(straight)
    last = records(straight)[-1]
    rows = STEPS * GLOBAL_BATCH
    assert [last["tokens/a"], last["tokens/b"]] == [rows // 4 * SEQ_LEN, rows * 3 // 4 * SEQ_LEN]
    assert last["epochs/b"] == pytest.approx(rows * 3 / 4 / 7, abs=1e-6)


ANSWERED: dict[str, dict[str, Any]] = {
    "dp2": {"parallel": {"tp": 1, "dp": 2}, "data": {"workers": 1}},
    "pp2": {"parallel": {"tp": 1, "dp": 1, "pp": 2}},
    "micro4": {"train": {"micro_batch": 4}},
}


def test_losses_of_answers_are_those_of_one_rank_in_every_layout(runs: Runs) -> None:
    """Ranks, stages and micro-batches have different numbers of targets; the mean is over all of them."""
    source = runs.folder / "chat.jsonl"
    rows = [{"prompt": f"question {n} " * (n % 5), "text": f"answer {n}\n" * (1 + n % 3)} for n in range(40)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(source, out=runs.folder / "chat.arrow", prompt="prompt")
    data = {"path": str(runs.folder / "chat.arrow")}
    alone = records(runs.run(changed(runs.plan("answers", "best_fit", 3), data=data)))
    for name, layout in ANSWERED.items():
        resolved = changed(
            runs.plan(f"answers-{name}", "best_fit", 3), **{**layout, "data": {**data, **layout.get("data", {})}}
        )
        parallel = resolved.config.parallel
        runs.ranks.run(parallel.dp * parallel.pp, train_rank, resolved)
        for ours, theirs in zip(records(resolved.config.run.dir), alone, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-6)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
            assert 0 < ours["targets"] == theirs["targets"] < GLOBAL_BATCH * SEQ_LEN
    prepare(source, out=runs.folder / "whole.arrow")
    whole = records(
        runs.run(changed(runs.plan("whole", "best_fit", 3), data={"path": str(runs.folder / "whole.arrow")}))
    )
    assert abs(whole[0]["loss"] - alone[0]["loss"]) > 1e-4


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"parallel": {"tp": 2, "dp": 1, "sequence_parallel": True}},
    "full": {"parallel": {"tp": 1, "dp": 2, "shard": "full"}, "train": {"remat": "selective"}},
    "stages": {"parallel": {"tp": 1, "pp": 2, "dp": 1}, "train": {"micro_batch": 1}},
    "compiled": {"compile": {"torch_compile": True}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masked_losses_are_those_of_one_rank(runs: Runs, layout: str) -> None:
    data = {"doc_mask": True}
    alone = runs.folder / "alone-masked"
    if not alone.exists():
        runs.run(changed(runs.plan(alone.name, "best_fit", 3), data=data))
    resolved = changed(runs.plan(layout, "best_fit", 3), data=data, **LAYOUTS[layout])
    parallel = resolved.config.parallel
    runs.ranks.run(
        parallel.tp * parallel.pp * parallel.dp, train_eagerly if layout == "compiled" else train_rank, resolved
    )
    for ours, theirs in zip(records(runs.folder / layout), records(alone), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def test_damage_in_a_corpus_ends_the_run_with_its_place(runs: Runs) -> None:
    content = runs.corpus.read_bytes()
    damaged = runs.folder / "damaged.arrow"
    damaged.write_bytes(content.replace(b"document 7\n", b"document 9\n"))
    resolved = changed(runs.plan("damaged", "concat", 60), data={"path": str(damaged)})
    with pytest.raises(
        AssertionError, match=r"DataError: .*damaged\.arrow is damaged: bytes .* documents 0 to 39, are"
    ):
        runs.run(resolved)


def test_another_batch_or_packing_is_not_continued(runs: Runs) -> None:
    runs.run(runs.plan("drift", "concat", 2))
    with pytest.raises(AssertionError, match=f"{CheckpointError.__name__}: .*the data's fingerprint is"):
        runs.run(runs.plan("drift", "best_fit", 4))
    batch = changed(runs.plan("drift", "concat", 4), train={"global_batch": 2 * GLOBAL_BATCH})
    with pytest.raises(AssertionError, match=r"4 lanes, and train\.global_batch here makes 8"):
        runs.run(changed(batch, checkpoint={"allow_drift": ("batch",)}))


def test_held_out_documents_are_evaluated(runs: Runs) -> None:
    resolved = runs.plan("held-out", "best_fit", 3, train={"eval_every": 1, "eval_batches": 2})
    folder = runs.run(changed(resolved, data={"validation_fraction": 0.3, "tokenizer": ""}))
    losses = [record["val_loss"] for record in records(folder)]
    assert len(set(losses)) == 3
    assert all(4 < loss < 7 for loss in losses)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["val_tokens"] == 2 * GLOBAL_BATCH * SEQ_LEN
    assert summary["bits_per_byte"] > 0


def test_another_corpus_is_evaluated(runs: Runs) -> None:
    prepare(write_corpus(runs.folder / "val", "a.jsonl", documents(70)[40:]), out=runs.folder / "val.arrow")
    prepare(runs.folder / "val", out=runs.folder / "val-ids.arrow", tokenizer=runs.tokenizer)
    train = {"eval_every": 2, "eval_batches": 3}
    losses = []
    for name in ("val", "val-ids"):
        resolved = runs.plan(f"evaluated-{name}", "best_fit", 2, train=train)
        folder = runs.run(changed(resolved, data={"validation_path": str(runs.folder / f"{name}.arrow")}))
        losses.append([record.get("val_loss") for record in records(folder)])
        assert [record["loss"] for record in records(folder)] == [
            r["loss"] for r in records(runs.straight("best_fit"))
        ][:2]
        assert json.loads((folder / "summary.json").read_text())["val_tokens"] == 3 * GLOBAL_BATCH * SEQ_LEN
    assert losses[0] == losses[1]
    assert losses[0][0] is None
    assert losses[0][1] == pytest.approx(5.5, abs=1.5)


def test_ids_need_no_tokenizer_and_refuse_another(runs: Runs) -> None:
    corpus = runs.folder / "ids.arrow"
    prepare(runs.folder / "src", out=corpus, tokenizer=runs.tokenizer)
    ids = changed(runs.plan("ids", "concat", STEPS), data={"path": str(corpus), "tokenizer": ""})
    assert course(runs.run(ids)) == course(runs.straight("concat"))
    other = write_tokenizer(runs.folder / "other", VOCABULARY - 10)
    with pytest.raises(AssertionError, match=f"{DataError.__name__}: .*did not make the ids"):
        runs.run(changed(ids, data={"tokenizer": str(other)}, run={"dir": runs.folder / "ids-other"}))


def test_an_absent_corpus_names_the_command_that_makes_it(runs: Runs) -> None:
    resolved = changed(runs.plan("absent", "concat", 1), data={"path": "absent.arrow"})
    with pytest.raises(AssertionError, match=r"nxtrain data prepare FILES --out absent\.arrow"):
        runs.run(resolved)
