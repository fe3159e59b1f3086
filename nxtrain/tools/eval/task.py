"""Local evaluation tasks: requests for log-likelihoods, and the metric computed from them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Metrics = Mapping[str, float | int | None]
"""Result of a task: the metric under its name, its standard error as `stderr`, the number of requests as `n`.

A standard error that is unknown is None.
"""


def is_number(value: object) -> bool:
    """Return True if a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Request:
    """Context with possible continuations, of which one is right."""

    context: str  # text before the continuations; empty: the continuations begin a text
    choices: tuple[str, ...]  # continuations whose log-likelihoods are compared
    answer: int = 0  # index of the right choice


@dataclass(frozen=True)
class Task:
    """Requests of one evaluation task, summarized by one metric.

    With several choices, the metric is `accuracy`: the share of requests whose right choice is the most likely one.
    With one choice, the metric is `bits_per_byte` of that choice.
    """

    name: str
    requests: tuple[Request, ...]  # all requests have several choices, or all have one

    @property
    def identity(self) -> str:
        """Hash of the requests; results with equal identities answer the same questions."""
        return hashlib.blake2b(repr(self.requests).encode(), digest_size=8).hexdigest()

    def measure(self, likelihoods: Sequence[Sequence[float]]) -> Metrics:
        """Compute the metric from the log-likelihood in nats of each choice of each request."""
        if len(self.requests[0].choices) > 1:
            return self._accuracy(likelihoods)
        return self._bits_per_byte([scores[0] for scores in likelihoods])

    def _accuracy(self, likelihoods: Sequence[Sequence[float]]) -> Metrics:
        num_right = 0
        for request, scores in zip(self.requests, likelihoods, strict=True):
            likeliest = max(range(len(scores)), key=scores.__getitem__)
            num_right += likeliest == request.answer
        n = len(self.requests)
        accuracy = num_right / n
        chance = sum(1 / len(request.choices) for request in self.requests) / n
        stderr = None
        if n > 1:  # the sample's deviation is undefined for one request
            stderr = math.sqrt(accuracy * (1 - accuracy) / (n - 1))
        return {"accuracy": accuracy, "stderr": stderr, "n": n, "chance": chance}

    def _bits_per_byte(self, likelihoods: Sequence[float]) -> Metrics:
        """Bits of all texts divided by their bytes, and the standard error of this ratio of two sums."""
        bits = [-nats / math.log(2) for nats in likelihoods]
        sizes = [len(request.choices[0].encode()) for request in self.requests]
        n, total = len(bits), sum(sizes)
        ratio = sum(bits) / total
        stderr = None
        if n > 1:
            squares = sum((b - ratio * size) ** 2 for b, size in zip(bits, sizes, strict=True))
            stderr = math.sqrt(squares * n / (n - 1)) / total
        return {"bits_per_byte": ratio, "stderr": stderr, "n": n}
