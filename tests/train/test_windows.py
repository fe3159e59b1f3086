"""Models with sliding windows next to transformers: logits, gradients, continued texts and scores beyond the window."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from nxtrain.backends.cpu import CpuBackend
from nxtrain.common import hf_files
from nxtrain.common.distributed.agreement import Ranks
from nxtrain.common.mesh import Mesh
from nxtrain.data.tokenization import train_bpe
from nxtrain.tools.eval.scorer import Scorer
from nxtrain.tools.eval.trained import Trained
from tests.support.commands import output_of
from tests.support.models import TEXT, hf_model, plan

LENGTH = 128
"""Tokens of the longest sequence, several windows."""

CASES = [(family, seed) for family in ("mistral", "qwen2", "qwen3") for seed in range(3)]


def windowed_model(folder: Path, family: str, seed: int) -> tuple[Any, int]:
    """Write a model whose layers have a drawn window; returns transformers' model and the window."""
    rng = Random(f"{family}/{seed}")
    window, heads = rng.randint(9, 40), rng.choice((2, 4))
    config: dict[str, Any] = {
        "vocab_size": 300,
        "hidden_size": heads * 12,
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice((1, heads)),
        "head_dim": 12,
        "num_hidden_layers": 2,
        "max_position_embeddings": LENGTH,
        "sliding_window": window,
    }
    if family != "mistral":
        config["max_window_layers"] = rng.choice((0, 1))
    model = hf_model(plan("gqa2", model={"family": family, "config": config}, train={"seq_len": 8}), seed, std=0.4)
    model.save_pretrained(folder)
    train_bpe([TEXT * 50], 300, folder / hf_files.TOKENIZER)
    return model.eval(), window


def without_window(model: Any) -> Any:
    """transformers' model of the same weights, whose layers see whole sequences."""
    layers = {"layer_types": ["full_attention"] * 2} if hasattr(model.config, "layer_types") else {}
    config = type(model.config).from_dict(
        {**model.config.to_dict(), **layers, "sliding_window": None, "use_sliding_window": False}
    )
    result = type(model)._from_config(config, attn_implementation="eager")
    result.load_state_dict(model.state_dict())
    return result.eval()


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    result: Tensor = model(ids[None]).logits[0]
    return result


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_logits_are_those_of_transformers_beyond_the_window(tmp_path: Path, family: str, seed: int) -> None:
    theirs, window = windowed_model(tmp_path, family, seed)
    ids = torch.randint(300, (3 * window,), generator=torch.Generator().manual_seed(seed))
    wanted = logits_of(theirs.double(), ids)
    full = logits_of(without_window(theirs).double(), ids)
    assert torch.equal(full[:window], wanted[:window])
    assert float((full[window] - wanted[window]).abs().max()) > 1e-9, "the first token that a window changes"
    model = Trained.find(str(tmp_path)).open(CpuBackend(), len(ids), Mesh(1, 0))
    with torch.no_grad():
        logits = model.logits(ids[None])[0]
    assert float((logits - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_texts_go_on_beyond_the_window_with_the_tokens_of_transformers(tmp_path: Path, family: str, seed: int) -> None:
    theirs, window = windowed_model(tmp_path, family, seed)
    tokenizer = Tokenizer.from_file(str(tmp_path / hf_files.TOKENIZER))
    prompt = "the quick"
    ids = tokenizer.encode(prompt).ids
    count = 2 * window
    written = theirs.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=None)[0].tolist()
    ends = [at for at, token in enumerate(written) if token in Trained.find(str(tmp_path)).ends]
    out = output_of("generate", tmp_path, "--temperature", 0, "--max-new-tokens", count, "--prompt", prompt)
    assert out == tokenizer.decode(written[: ends[0]] if ends else written) + "\n"


@pytest.mark.parametrize(("family", "seed"), CASES)
def test_texts_beyond_the_window_are_scored_with_it(tmp_path: Path, family: str, seed: int) -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    theirs, window = windowed_model(tmp_path, family, seed)
    scorer = Scorer(Trained.find(str(tmp_path)), CpuBackend(), Ranks(Mesh(1, 0)))
    assert scorer.length == LENGTH > window
    text = TEXT * 4
    ids = scorer.model.tokenizer.encode(text).ids
    assert len(ids) > window
    wanted = 0.0
    for context_ids, scored in map(make_disjoint_window, get_rolling_token_windows(ids, scorer.prefix, LENGTH, 1)):
        row = torch.tensor([*context_ids, *scored])
        chances = logits_of(theirs, row[:-1]).double().log_softmax(-1)[-len(scored) :]
        wanted += float(chances.gather(1, torch.tensor(scored)[:, None]).sum())
    assert scorer.rolling([text])[0].nats == pytest.approx(wanted, abs=1e-3)
