"""Tasks of an evaluation: requests for log-likelihoods, and the metric that follows from the answers."""

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
    """True if a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class Request:
    """Text with its possible continuations."""

    context: str  # the text; empty: the continuations begin a text
    choices: tuple[str, ...]  # continuations whose log-likelihoods are wanted
    answer: int = 0  # number of the right choice


@dataclass(frozen=True)
class Task:
    """Requests with one metric.

    With several choices, the metric is `accuracy`: the share of requests whose right choice is the likeliest one. With
    one choice, the metric is `bits_per_byte` of that choice.
    """

    name: str
    requests: tuple[Request, ...]  # the requests, all with several choices, or all with one

    @property
    def identity(self) -> str:
        """Hash of the requests: results with equal identities answer the same questions."""
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
        if n > 1:  # the sample's own deviation, which one request does not have
            stderr = math.sqrt(accuracy * (1 - accuracy) / (n - 1))
        return {"accuracy": accuracy, "stderr": stderr, "n": n, "chance": chance}

    def _bits_per_byte(self, likelihoods: Sequence[float]) -> Metrics:
        """Bits of all texts over their bytes, and the standard error of that ratio of two sums."""
        bits = [-nats / math.log(2) for nats in likelihoods]
        sizes = [len(request.choices[0].encode()) for request in self.requests]
        n, total = len(bits), sum(sizes)
        ratio = sum(bits) / total
        stderr = None
        if n > 1:
            squares = sum((b - ratio * size) ** 2 for b, size in zip(bits, sizes, strict=True))
            stderr = math.sqrt(squares * n / (n - 1)) / total
        return {"bits_per_byte": ratio, "stderr": stderr, "n": n}
