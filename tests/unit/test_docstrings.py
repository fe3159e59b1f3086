"""Docstrings begin with a noun or a verb, and public names are terms of the field."""

from __future__ import annotations

import pytest

from tests.support.docstrings import PROPER_NAMES, ROOT, first_lines, found, offends, public_names, riddles


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


def test_no_docstring_begins_with_a_question_word() -> None:
    refused = [f"{place}: {line}" for place, line in found()]
    assert not refused, "begin these with a noun or a verb:\n" + "\n".join(refused)


@pytest.mark.parametrize("name", ["told", "say_begun", "LastingSink", "put_aside", "HeartbeatBoard"])
def test_an_everyday_word_is_found_in_every_form_of_a_name(name: str) -> None:
    assert riddles(name)


def test_public_names_are_terms_of_the_field() -> None:
    refused = []
    for path in sorted([*(ROOT / "nxtrain").rglob("*.py"), *(ROOT / "models").rglob("*.py")]):
        names = [(1, path.stem), *public_names(path.read_text(encoding="utf-8"))]
        refused += [
            f"{path.relative_to(ROOT)}:{line}: {name}"
            for line, name in names
            if riddles(name) and name not in PROPER_NAMES
        ]
    assert not refused, "take these names from docs/glossary.md:\n" + "\n".join(refused)
