"""A token is drawn as often as its score, the temperature and the number of choices say."""

from __future__ import annotations

import pytest
import torch

from nxtrain.train.sampling import Sampling

SCORES = torch.tensor([2.0, -1.0, 0.5, 1.0, -3.0])
DRAWS = 4000


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.5, 0), (2.0, 3), (1.0, 99)])
def test_frequencies_are_the_softmax_of_the_best_scores(temperature: float, top_k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [Sampling(temperature, top_k).draw(SCORES, generator) for _ in range(DRAWS)]
    best = SCORES.topk(min(top_k or len(SCORES), len(SCORES))).indices
    expected = torch.zeros(len(SCORES))
    expected[best] = (SCORES[best] / temperature).softmax(0)
    found = torch.bincount(torch.tensor(drawn), minlength=len(SCORES)) / DRAWS
    assert bool(((found - expected).abs() <= 5 * (expected * (1 - expected) / DRAWS).sqrt()).all()), (found, expected)


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (0.0, 3), (5.0, 1)])
def test_no_temperature_or_one_choice_takes_the_likeliest(temperature: float, top_k: int) -> None:
    generator = torch.Generator().manual_seed(0)
    assert {Sampling(temperature, top_k).draw(SCORES, generator) for _ in range(50)} == {0}
