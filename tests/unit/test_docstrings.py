"""Docstrings begin with a noun or a verb, and the list of older first lines only gets shorter."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.docstrings import OFFENDERS, ROOT, allowed, first_lines, found, offends

LIST = OFFENDERS.relative_to(ROOT)


@pytest.mark.parametrize(
    "line", ["What a run is.", "Whether it is.", "who", "`Which` one.", "How: by hand.", "Where's it?"]
)
def test_a_question_word_offends_in_every_form(line: str) -> None:
    assert offends(line)


@pytest.mark.parametrize("line", ["Whatever fits.", "The rank that hangs.", "Howitzers.", "Count what is there.", ""])
def test_other_words_do_not_offend(line: str) -> None:
    assert not offends(line)


def test_docstrings_of_modules_classes_functions_and_fields_are_read() -> None:
    source = '''"""Module.

What else it has.
"""

LIMIT = 3
"""Constant."""

class _Thing:
    """Class."""

    size: int
    """Field,
    and more."""

    async def _method(self):
        """Method."""

        def inner():
            """Inner."""
'''
    assert sorted(first_lines(source)) == [
        (1, "Module."),
        (7, "Constant."),
        (9, "Class."),
        (13, "Field,"),
        (16, "Method."),
        (19, "Inner."),
    ]


def test_no_other_docstring_begins_with_a_question_word() -> None:
    room = Counter(allowed())
    refused = []
    for place, line in found():
        room[line] -= 1
        if room[line] < 0:
            refused.append(f"{place}: {line}")
    assert not refused, "begin these with a noun or a verb:\n" + "\n".join(refused)


def test_the_list_of_older_first_lines_only_shrinks() -> None:
    done = Counter(allowed()) - Counter(line for _, line in found())
    assert not done, f"delete these lines of {LIST}, or run python scripts/write_docs.py:\n" + "\n".join(
        done.elements()
    )


def test_the_list_is_sorted() -> None:
    assert allowed() == sorted(allowed())
