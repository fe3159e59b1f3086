"""A run with context parallelism is evaluated, continued and converted as a run without."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from nxtrain.checkpoint.convert.nxd_files import open_file
from tests.support.commands import in_process, output_of
from tests.support.models import TEXT
from tests.support.ranks import RankPool
from tests.support.runs import run_plan, train_rank


def test_a_run_with_cp_is_evaluated_continued_and_converted_as_one_without(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(8):
        text = " ".join(random.Random(number).choices(TEXT.split(), k=60))
        (tmp_path / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    data = {"source": "text", "path": str(tmp_path / "texts"), "validation_fraction": 0.3}
    losses, weights = [], []
    for cp in (1, 2):
        run, nxd = tmp_path / f"cp{cp}", tmp_path / f"nxd{cp}"
        sections: dict[str, Any] = {"model": {"config": {"vocab_size": 300}}, "parallel": {"tp": 1, "cp": cp}}
        ranks.run(cp, train_rank, run_plan(run, data, steps=1, **sections))
        out = output_of("eval", run, "--tasks", "held_out", "--json")
        losses.append(json.loads(out)["tasks"]["held_out"])
        code, out, err = in_process("generate", run, "--prompt", "the quick", "--max-new-tokens", "4")
        assert code == 0 and out, err
        output_of("convert", "nxtrain-to-nxd", run, nxd)
        files = sorted((nxd / "step_1" / "model").glob("*.pt"))
        assert len(files) == 1
        weights.append(open_file(files[0]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-3, atol=1e-4)
