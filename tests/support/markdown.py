"""Markdown pages of the repository as tests read them: blocks of code, code in lines, links, headings, sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n", flags=re.DOTALL | re.MULTILINE)
GENERATED = re.compile(r"^<!-- begin: .*?^<!-- end: \w+ -->\n", flags=re.DOTALL | re.MULTILINE)
ABBREVIATION = re.compile(r"\b(et al|e\.g|i\.e)\.")


def pages() -> list[Path]:
    """Every Markdown page that people read."""
    folders = ("configs", "models", "tests/faults", "tests/golden", "compile_cache")
    own = [path for folder in folders for path in sorted((ROOT / folder).glob("*.md"))]
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *own]


def name(page: Path) -> str:
    """Path of a page below the repository."""
    return str(page.relative_to(ROOT))


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of every fenced block; commands have no language."""
    return [(found[1], found[2]) for found in FENCE.finditer(text)]


def inline_code(text: str) -> list[str]:
    """Content of every code span outside of fenced blocks, line breaks as spaces."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))]


def links(text: str) -> list[str]:
    """Target of every link and image outside of fenced blocks."""
    return re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def sentences(text: str) -> list[str]:
    """Sentences of paragraphs and list items, code spans as one word; neither headings nor tables."""
    return [sentence for line in _paragraphs(text) if not line.startswith("|") for sentence in _split(line)]


def cell_sentences(text: str) -> list[str]:
    """Sentences of the cells of tables."""
    rows = (line for line in _paragraphs(text) if line.startswith("|") and not re.fullmatch(r"[|\-: ]+", line))
    return [sentence for row in rows for cell in re.split(r"(?<!\\)\|", row) for sentence in _split(cell)]


def num_words(sentence: str) -> int:
    """Words of a sentence: what stands between spaces and has a letter or a digit."""
    return sum(any(letter.isalnum() for letter in word) for word in sentence.split())


def _split(text: str) -> Iterator[str]:
    for sentence in re.split(r"(?<=[.!?])[\"')\]*]*\s+", ABBREVIATION.sub(r"\1", text)):
        if num_words(sentence):
            yield sentence.strip()


def _paragraphs(text: str) -> Iterator[str]:
    """Paragraphs, list items and table rows, each as one line."""
    text = GENERATED.sub("\n", FENCE.sub("\n", text))
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]+`", "code", text)
    text = re.sub(r"^#.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^(\|.*)$", r"\n\1\n", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", text):
        if line := " ".join(paragraph.split()):
            yield line
