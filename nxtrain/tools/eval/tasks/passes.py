"""Metric pass@k of programs that a model writes: the chance that at least one of k samples solves a problem.

The metric `code_eval` of the Hugging Face hub runs the programs on this machine. The harness refuses the tasks unless
`HF_ALLOW_CODE_EVAL=1` is set.

Source: Chen et al. 2021 (arXiv:2107.03374) equation 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def programs(resps: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Programs to run for each problem: the problem's prompt followed by each sample."""
    continued = []
    for samples, doc in zip(resps, docs, strict=True):
        continued.append([doc["prompt"] + sample for sample in samples])
    return continued


def pass_at_k(references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]) -> dict[str, float]:
    """Estimate pass@k of one problem for each k, by running the problem's test on all of its programs."""
    import evaluate

    _, results = evaluate.load("code_eval").compute(references=references, predictions=predictions, k=[1])
    passed = [bool(result["passed"]) for _, result in results[0]]
    return {f"pass@{number}": estimate(len(passed), sum(passed), number) for number in k}


def estimate(n: int, c: int, k: int) -> float:
    """Unbiased estimate of pass@k, if c of n samples pass.

    It is the chance that at least one of k samples passes, drawn from the n without replacement.
    """
    if n < k:
        raise ValueError(f"pass@{k} needs {k} samples of each problem, but there are {n}; raise repeats of the task")
    return 1 - math.comb(n - c, k) / math.comb(n, k)
