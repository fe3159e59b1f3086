"""Preference accuracy of a model on a prepared corpus of answer pairs, optionally relative to a reference model.

An answer's reward is the sum of its tokens' log-probabilities, without the prompt. With a reference model, the reward
is the difference from the reference's sum, times beta, as in DPO.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from nxtrain.backends.base import Backend
from nxtrain.common import hf_files
from nxtrain.common.errors import ConfigError, DataError
from nxtrain.common.io.object_store import content_of
from nxtrain.data.arrow.prepared import PreparedCorpus
from nxtrain.tools.eval.scorer import Row, Scorer
from nxtrain.tools.eval.task import Metrics
from nxtrain.tools.eval.trained import Trained


class PairsTask:
    """Evaluation task on the preference pairs of a corpus.

    Args:
        path: Corpus of `nxtrain data prepare --pairs`.
        reference: Reference model; None: rewards are not relative to a reference.
        beta: Factor of a reward relative to a reference.
        limit: Maximum number of pairs, starting with the first; 0: all.

    Raises:
        DataError: The corpus is damaged or holds no pairs.
    """

    name = "preferences"

    def __init__(self, path: Path, reference: Trained | None, beta: float, limit: int) -> None:
        corpus = PreparedCorpus(path)
        if not corpus.has_pairs or len(corpus) < 2 or len(corpus) % 2:  # noqa: PLR2004 - answers of a pair
            raise DataError(f"{path} holds no pairs; prepare them with nxtrain data prepare --pairs")
        self._corpus = corpus
        self._reference = reference
        self._beta = beta
        self._num_pairs = min(limit or len(corpus), len(corpus) // 2)
        self._by_reference: NDArray[np.float64] | None = None
        given = (corpus.identity, "" if reference is None else reference.identity, beta, self._num_pairs)
        self.identity = hashlib.blake2b(repr(given).encode(), digest_size=8).hexdigest()

    def run(self, scorer: Scorer, backend: Backend) -> Metrics:
        """Measure a model's preferences on the pairs; every rank calls this method.

        Raises:
            ConfigError: The reference's maximum sequence length is below that of the evaluated model.
        """
        rows = [self._row(document, scorer) for document in range(2 * self._num_pairs)]
        groups: list[list[Row]] = []
        for pair in zip(rows[::2], rows[1::2], strict=True):
            longest = max(len(row.ids) for row in pair) - 1  # tokens that a model reads; the last one is only a target
            if longest <= scorer.length:
                groups += [[row] for row in pair]
        left_out = (len(rows) - len(groups)) // 2
        if not groups:
            raise DataError(f"{self._corpus.path}: every pair exceeds the model's maximum of {scorer.length} tokens")
        rewards = _sums(scorer, groups)
        if self._reference is not None:
            if self._by_reference is None:
                opened = Scorer(self._reference, backend, scorer.ranks)
                if opened.length < scorer.length:
                    what = f"takes at most {opened.length} tokens, but {scorer.model.location} takes {scorer.length}"
                    way_out = "name the model from which the run began"
                    raise ConfigError(f"--reference {self._reference.location} {what}; {way_out}")
                opened.progress = scorer.progress
                self._by_reference = _sums(opened, groups)
            rewards = self._beta * (rewards - self._by_reference)
        n = len(groups) // 2
        accuracy = fmean((rewards[::2] > rewards[1::2]).tolist())
        stderr = None
        if n > 1:
            stderr = math.sqrt(accuracy * (1 - accuracy) / (n - 1))
        metrics = {"accuracy": accuracy, "stderr": stderr, "n": n, "chance": 0.5, "left_out": left_out}
        chosen, rejected = fmean(rewards[::2].tolist()), fmean(rewards[1::2].tolist())
        metrics |= {"margin": chosen - rejected, "reward_chosen": chosen, "reward_rejected": rejected}
        if self._reference is None:
            means = rewards / [row.num_scored for (row,) in groups]
            metrics["accuracy_per_token"] = fmean((means[::2] > means[1::2]).tolist())
        return metrics

    def _row(self, document: int, scorer: Scorer) -> Row:
        corpus, model = self._corpus, scorer.model
        content = corpus.content(document)
        ids = tuple(corpus.ids(document).tolist())
        if max(ids) >= model.config.vocab_size:
            model.refuse_foreign(max(ids))
        num_scored = len(ids) - max(1, corpus.prompt(document, content))
        if num_scored < 1:
            raise DataError(f"{corpus.name_of(document)}: an answer of a pair has no token; prepare the corpus again")
        return Row(ids, num_scored)

    def check(self, model: Trained) -> None:
        """Raise a DataError if the corpus was prepared with another tokenizer than that of the models."""
        for trained in filter(None, (model, self._reference)):
            made = hashlib.blake2b(content_of(trained.location / hf_files.TOKENIZER)).hexdigest()
            if made != self._corpus.tokenizer:
                hint = f"prepare the pairs with --tokenizer {trained.location}"
                raise DataError(
                    f"{self._corpus.path} has ids of another tokenizer than that of {trained.location}; {hint}"
                )


def _sums(scorer: Scorer, groups: list[list[Row]]) -> NDArray[np.float64]:
    """Summed log-probability, in nats, of the scored tokens of each group of rows."""
    return np.array([score.nats for score in scorer.of_rows(groups)])
