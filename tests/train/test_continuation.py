"""A trained model continues a text by what it has learnt, and by chance only as far as temperature and seed allow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nxtrain.backends.cpu import CpuBackend
from nxtrain.tools.eval.generate import Sampling
from tests.support import models
from tests.support.runs import run_plan, train_rank

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu"]
PROMPT = "gamma delta"
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on texts in which each word decides the next."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "texts").mkdir()
    for number, start in enumerate(np.random.default_rng(0).integers(0, len(WORDS), 60)):
        text = " ".join(WORDS[(start + place) % len(WORDS)] for place in range(60))
        (folder / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    resolved = run_plan(
        folder / "run",
        {"source": "text", "path": str(folder / "texts")},
        steps=60,
        model={"config": {"vocab_size": 320}},
        train={"seq_len": 32, "global_batch": 16, "micro_batch": 16},
        optim={"warmup_steps": 5},
    )
    train_rank(CpuBackend(), resolved)
    return folder / "run"


def continued(run: Path, temperature: float = 0.0, top_k: int = 0, seed: int = 0, tokens: int = NUM_TOKENS) -> str:
    text = models.continued(run, PROMPT, tokens, Sampling(temperature, top_k), seed)
    assert text.startswith(PROMPT)
    return text.removeprefix(PROMPT)


def test_chance_comes_from_the_seed_and_grows_with_the_temperature(run: Path) -> None:
    sure = continued(run)
    hot = [continued(run, temperature=5.0, seed=seed) for seed in range(4)]
    assert hot == [continued(run, temperature=5.0, seed=seed) for seed in range(4)]
    assert len({*hot, sure}) == 5
    assert {continued(run, temperature=0.0, seed=seed) for seed in range(3)} == {sure}
    assert continued(run, temperature=5.0, top_k=1, seed=3) == sure
    assert continued(run, temperature=0.05, seed=3) == sure
