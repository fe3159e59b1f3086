"""Evaluation task QuAC: its questions, and the F1 score of answers as defined by its authors.

Source: Choi et al. 2018 (arXiv:1808.07036) section 5.1, and their `scorer.py`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

NO_ANSWER = "CANNOTANSWER"  # answer to a question that the section does not answer; each section ends with this word
LEAST_AGREEMENT = 0.4  # minimum F1 between human answers; questions below are left out


def turns(docs: Any) -> Any:
    """Convert dialogues to one row per question, with the questions and answers before it as context.

    Questions on which the human answers disagree are left out.
    """
    return docs.map(_questions, batched=True, batch_size=100, remove_columns=docs.column_names)


def _questions(batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    rows: dict[str, list[Any]] = {name: [] for name in ("title", "section", "context", "dialogue", "question")}
    rows["answers"] = []
    names = ("wikipedia_page_title", "section_title", "context", "questions", "answers", "orig_answers")
    for title, section, context, questions, answers, own in zip(*(batch[name] for name in names), strict=True):
        dialogue = ""
        for question, texts, answer in zip(questions, answers["texts"], own["texts"], strict=True):
            # Human answers of the majority: either all real answers, or one NO_ANSWER.
            answered = [text for text in texts if text != NO_ANSWER]
            majority = answered if 2 * len(answered) > len(texts) else [NO_ANSWER]
            if agreement(majority) >= LEAST_AGREEMENT:
                for name, value in zip(rows, (title, section, context, dialogue, question, majority), strict=True):
                    rows[name].append(value)
            dialogue += f"Q: {question}\n\nA: {answer}\n\n"
    return rows


def score(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """F1 of a model's answer against the human answers."""
    answer = results[0].strip().partition("\n")[0]
    return {"f1": _without_one(doc["answers"], lambda rest, left: _best(answer, rest or [left]))}


def agreement(answers: Sequence[str]) -> float:
    """Mean F1 of each human answer against the others; 1 for a single answer."""
    return _without_one(answers, lambda rest, left: _best(left, rest) if rest else 1.0)


def f1(answer: str, wanted: str) -> float:
    """F1 of two answers over their words, ignoring case, punctuation and articles."""
    a, b = _words(answer), _words(wanted)
    same = sum((Counter(a) & Counter(b)).values())
    return 2 * same / (len(a) + len(b)) if same else 0.0


def _without_one(answers: Sequence[str], value: Callable[[list[str], str], float]) -> float:
    """Mean over the answers of `value(others, answer)`, where `others` are all answers except that one."""
    return fmean(value([*answers[:at], *answers[at + 1 :]], left) for at, left in enumerate(answers))


def _best(answer: str, answers: Sequence[str]) -> float:
    return max(f1(answer, wanted) for wanted in answers)


def _words(text: str) -> list[str]:
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()
