"""Share of problems that one of k samples solves: pass@k of programs that a model writes.

Programs run on this machine, by the metric `code_eval` of the Hugging Face hub. The harness refuses the tasks until
`HF_ALLOW_CODE_EVAL=1` allows that.

Source: Chen et al. 2021 (arXiv:2107.03374) equation 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def programs(resps: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Programs to run: the prompt of each problem, continued by each sample."""
    continued = []
    for samples, doc in zip(resps, docs, strict=True):
        continued.append([doc["prompt"] + sample for sample in samples])
    return continued


def pass_at_k(references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]) -> dict[str, float]:
    """Estimates of pass@k of one problem, from its test and its programs."""
    import evaluate

    _, results = evaluate.load("code_eval").compute(references=references, predictions=predictions, k=[1])
    passed = [bool(result["passed"]) for _, result in results[0]]
    return {f"pass@{number}": estimate(len(passed), sum(passed), number) for number in k}


def estimate(n: int, c: int, k: int) -> float:
    """Unbiased estimate of pass@k: chance that k samples, drawn from n without replacement, hold one of c that pass."""
    if n < k:
        raise ValueError(f"pass@{k} needs {k} samples of each problem, and there are {n}; raise repeats of the task")
    return 1 - math.comb(n - c, k) / math.comb(n, k)
