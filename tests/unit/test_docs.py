"""The documentation is true to the code: links, paths, keys and generated parts; and its sentences are short."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from statistics import mean
from types import ModuleType

import pytest

from nxtrain.backends.neuron import torchneuron
from nxtrain.backends.neuron.sdk import RELEASES
from nxtrain.common.errors import NxtrainError
from nxtrain.config.load import load
from nxtrain.config.schema import RunConfig
from nxtrain.config.show import keys
from nxtrain.parallel.schedule import Action, Kind
from nxtrain.parallel.simulate import Span
from tests.support import ROOT, generated_docs
from tests.support.generated_docs import (
    FENCE,
    GENERATED,
    anchors,
    blocks,
    cell_sentences,
    inline_code,
    links,
    markdown_pages,
    name,
    num_words,
    sentences,
)
from tests.support.overlap import Profile

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGES = markdown_pages()
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
DOCS = [page for page in PAGES if page.parent == ROOT / "docs"]

MAX_README_LINES = 150
MAX_ROOMS = 14
MAX_DRAWN_PARTS = 3  # nxtrain, a room, a folder of the room
MAX_WORDS = 20
MAX_MEAN_WORDS = 16
MAX_COLUMNS = 120
MAX_PICTURE_BYTES = 30_000

OLD_WORDS = re.compile(
    r"\b(told|says?|saying|leaves?|befalls?|befell|heeds?|heeded|aside|bears?|lasting|last words|whoever|anew)\b",
    re.IGNORECASE,
)
"""Words that hide a term of the field."""

KEYS = {key.name: key for key in keys()}
FILES_LIKE_KEYS = {"metrics.jsonl", "model.done", "model.log", "model.neff", "run.toml", "train.sbatch"}
MADE_LATER = ("models/gemini", "compile_cache/manifests")
"""Paths that the documentation names and that are made by readers or by runs."""


def parametrize_pages(chosen: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", chosen, ids=[name(page) for page in chosen])


# Prose


def long_sentences(text: str) -> list[str]:
    return [sentence for sentence in (*sentences(text), *cell_sentences(text)) if num_words(sentence) > MAX_WORDS]


def mean_words(texts: list[str]) -> float:
    return mean(num_words(sentence) for text in texts for sentence in sentences(text))


@parametrize_pages(PAGES)
def test_no_sentence_is_long(page: Path) -> None:
    assert long_sentences(TEXTS[page]) == []


def test_sentences_are_short_on_the_whole() -> None:
    assert mean_words([TEXTS[ROOT / "README.md"], *(TEXTS[page] for page in DOCS)]) < MAX_MEAN_WORDS


@parametrize_pages(PAGES)
def test_terms_of_the_field_are_used(page: Path) -> None:
    prose = "\n".join([*sentences(TEXTS[page]), *cell_sentences(TEXTS[page])])
    assert OLD_WORDS.findall(prose) == []


def test_the_readme_is_short() -> None:
    assert TEXTS[ROOT / "README.md"].count("\n") <= MAX_README_LINES


def wide_lines(text: str) -> list[str]:
    """Lines of prose that are too long; a table, an image and a block have no line to break."""
    lines = FENCE.sub("", text).splitlines()
    return [line for line in lines if len(line) > MAX_COLUMNS and not line.startswith(("|", "!["))]


@parametrize_pages(PAGES)
def test_every_page_is_ascii_in_lines_that_fit(page: Path) -> None:
    assert TEXTS[page].isascii()
    assert wide_lines(TEXTS[page]) == []


def test_sentences_are_found_in_paragraphs_lists_and_cells() -> None:
    text = (
        "# A heading is none\n\nOne `two three`\nfour. Five (six et al. 2024)? [Seven eight](x.md)!\n\n- nine\n- ten;\n"
        "  eleven\n\n```\nno words. here\n```\n\n| a cell. b | c |\n|---|---|\n\n1. twelve\n"
        "<!-- begin: x; y -->\nnone of these\n<!-- end: x -->\n"
    )
    result = ["One code four.", "Five (six et al 2024)?", "Seven eight!", "nine", "ten; eleven", "twelve"]
    assert sentences(text) == result
    assert cell_sentences(text) == ["a cell.", "b", "c"]
    assert [num_words(sentence) for sentence in result] == [3, 5, 2, 1, 2, 1]


def test_a_long_sentence_a_long_page_and_an_old_word_are_noticed() -> None:
    assert long_sentences("word " * MAX_WORDS + ".") == []
    assert len(long_sentences("word " * (MAX_WORDS + 1) + ".")) == 1
    assert len(long_sentences("| " + "word " * (MAX_WORDS + 1) + "|")) == 1
    assert wide_lines(f"{'x' * 121}\n|{'x' * 121}\n```\n{'x' * 121}\n```\n") == ["x" * 121]
    assert mean_words(["word " * 17 + ". " + "word " * 17 + "."]) > MAX_MEAN_WORDS
    assert OLD_WORDS.findall("It is told, and whoever SAYS so leaves.") == ["told", "whoever", "SAYS", "leaves"]


# Links, paths and names


def broken_links(page: Path, text: str) -> list[str]:
    """Links to files or headings that do not exist."""
    results = []
    for link in links(text):
        if link.startswith(("https://", "http://")):
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        exists = target.exists() and (not anchor or anchor in anchors(target.read_text(encoding="utf-8")))
        if not exists or not target.resolve().is_relative_to(ROOT):
            results.append(link)
    return results


def broken_names(text: str) -> list[str]:
    """Code spans that name a path, a module, a test file or a configuration key that does not exist."""
    text = GENERATED.sub("", text)
    return [span for span in inline_code(text) if not (_path(span) and _module(span) and _test(span) and _key(span))]


def _path(span: str) -> bool:
    if not re.fullmatch(r"(\.ci|compile_cache|configs|docs|models|nxtrain|scripts|tests)/[\w./-]*", span):
        return True
    return span.startswith(MADE_LATER) or (ROOT / span).exists()


def _test(span: str) -> bool:
    return not re.fullmatch(r"test_\w+\.py", span) or any((ROOT / "tests").rglob(span))


def _module(span: str) -> bool:
    """False for `nxtrain.a.b.C` where neither the module nor what it defines exists."""
    if not re.fullmatch(r"nxtrain(\.\w+)+", span):
        return True
    if span in {"nxtrain.models", "nxtrain.json"}:  # a group of entry points; a file
        return True
    words = span.split(".")
    for end in range(len(words), 0, -1):
        path = ROOT.joinpath(*words[:end])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                source = file.read_text(encoding="utf-8")
                return all(re.search(rf"^\s*(class|def) {word}\b", source, re.MULTILINE) for word in words[end:])
    return False


def _key(span: str) -> bool:
    match = re.fullmatch(r"(([a-z]+)\.[a-z0-9_]+)(?:=(.*))?", span)
    if not match or span in FILES_LIKE_KEYS or match[2] not in RunConfig.model_fields:
        return True
    key, value = match[1], match[3] or ""
    choices = KEYS[key].kind.split(" | ") if key in KEYS else []
    return key in KEYS and (len(choices) == 1 or not re.fullmatch("[a-z][a-z0-9_-]*", value) or value in choices)


@parametrize_pages(PAGES)
def test_every_link_and_every_name_in_code_exists(page: Path) -> None:
    assert broken_links(page, TEXTS[page]) == []
    assert broken_names(TEXTS[page]) == []


def test_a_broken_link_and_a_wrong_name_are_noticed() -> None:
    index = ROOT / "docs" / "index.md"
    text = "[a](none.md) [b](goodput.md#none) [c](goodput.md#how-often-to-save) [d](../README.md) [e](#none) [f](/etc)"
    assert broken_links(index, text) == ["none.md", "goodput.md#none", "#none", "/etc"]
    text = (
        "`tests/none.py` `tests/unit/test_docs.py` `nxtrain.none` `nxtrain.plan.goodput.Failures` "
        "`nxtrain.common.mesh.Nesh` "
        "`test_none.py` `test_docs.py` `train.stepz` `train.steps` `parallel.shard=zero9` `parallel.shard=zero1`"
    )
    wrong = [
        "tests/none.py",
        "nxtrain.none",
        "nxtrain.common.mesh.Nesh",
        "test_none.py",
        "train.stepz",
        "parallel.shard=zero9",
    ]
    assert broken_names(text) == wrong


def test_the_index_has_every_page_of_the_documentation_and_the_readme_has_the_index() -> None:
    result = set(links(TEXTS[ROOT / "docs" / "index.md"]))
    assert result == {page.name for page in DOCS} - {"index.md"}
    assert len(DOCS) == 27
    assert "docs/index.md" in links(TEXTS[ROOT / "README.md"])


def test_every_extra_has_a_row_with_its_index() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| [^|]+ \|$", TEXTS[ROOT / "docs" / "quickstart.md"], re.MULTILINE)
    assert set(extras) <= set(rows)


def test_the_status_table_has_every_backend_and_its_torch_and_sdk() -> None:
    rows = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", TEXTS[ROOT / "README.md"], re.MULTILINE))
    assert set(rows) == set(KEYS["backend.name"].kind.split(" | ")) - {"auto"}
    assert f"| {min(RELEASES)} to {max(RELEASES)} |" in rows["neuron"]
    assert f"| {', '.join(torchneuron.TORCH)} | {torchneuron.SDK} (public beta) |" in rows["neuron-native"]


def exit_codes(error: type[NxtrainError]) -> set[int]:
    return {error.exit_code}.union(*(exit_codes(child) for child in error.__subclasses__()))


def test_the_readme_and_the_page_on_recovery_have_every_exit_code() -> None:
    codes = exit_codes(NxtrainError)
    assert codes > {2, 75}
    (row,) = re.findall(r"^\| (0 \| [\d |]+) \|$", TEXTS[ROOT / "README.md"], re.MULTILINE)
    assert {int(code) for code in row.split(" | ")} == (codes - {1}) | {0}
    table = re.findall(r"^\| ([\d, +n]+) \| .* \| .* \|$", TEXTS[ROOT / "docs" / "recovery.md"], re.MULTILINE)
    assert {int(code) for cell in table for code in re.findall(r"\d+", cell)} == codes | {0, 1, 126, 127, 128}


# Blocks that are not commands


@parametrize_pages(PAGES)
def test_every_block_has_a_known_language_and_its_configuration_loads(page: Path, tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for number, (language, content) in enumerate(blocks(TEXTS[page])):
        assert language in {"", "text", "toml"}, f"{language} blocks are not checked"
        if language == "toml":
            file = tmp_path / f"{number}.toml"
            file.write_text(content, encoding="utf-8")
            load(file, ())


# Parts that are written from the code


def test_generated_parts_are_those_that_the_code_asks_for() -> None:
    stale = [name(page) for page, text, wanted in generated_docs.pages() if text != wanted]
    assert stale == [], "run python scripts/write_docs.py"


def test_generated_parts_have_every_key_and_every_room() -> None:
    tables, rooms = generated_docs.key_tables(), generated_docs.rooms()
    assert all(f"| `{key}` |" in tables for key in KEYS)
    drawn = {line.split()[0] for line in rooms.splitlines()[1:-1] if line.split()}
    folders = [path for path in (ROOT / "nxtrain").rglob("*") if (path / "__init__.py").exists()]
    assert drawn == {path.name for path in folders if len(path.relative_to(ROOT).parts) <= MAX_DRAWN_PARTS}
    assert len([path for path in folders if path.parent == ROOT / "nxtrain"]) <= MAX_ROOMS


def test_the_readme_draws_the_rooms_in_the_order_of_imports() -> None:
    picture = TEXTS[ROOT / "README.md"].partition("## Rooms")[2].partition("```text\n")[2].partition("```")[0]
    drawn = [room for line in picture.splitlines() for room in line[:32].split()]
    (layers,) = (c["layers"] for c in generated_docs.import_contracts() if c["name"] == "Imports run one way")
    layer_of = {room: number for number, layer in enumerate(layers) for room in re.split(r" [|:] ", layer)}
    assert sorted(["__main__", *drawn]) == sorted(layer_of)
    numbers = [layer_of[room] for room in drawn]
    assert numbers == sorted(numbers)


def test_a_stale_part_is_replaced_and_the_rest_of_the_page_kept() -> None:
    page = "before\n<!-- begin: keys; x -->\nold\n<!-- end: keys -->\nafter\n"
    assert generated_docs.replaced(page, "keys", "new\n") == page.replace("old", "new")
    with pytest.raises(AssertionError, match="no place for files"):
        generated_docs.replaced(page, "files", "new\n")


# Pictures


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "scripts" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("picture", "page"),
    [
        ("loss", "README.md"),
        ("pipeline", "docs/parallelism.md"),
        ("overlap", "docs/performance.md"),
        ("schedules", "docs/schedules.md"),
    ],
)
def test_pictures_are_small_and_well_formed(picture: str, page: str) -> None:
    path = ROOT / "docs" / "images" / f"{picture}.svg"
    assert path.stat().st_size < MAX_PICTURE_BYTES
    assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert os.path.relpath(path, (ROOT / page).parent) in links(TEXTS[ROOT / page])


def test_the_loss_curve_goes_through_every_record(pictures: ModuleType) -> None:
    records = [json.loads(line) for line in ('{"step": 1, "loss": 4.0}', '{"step": 2, "loss": 2.0, "val_loss": 3.0}')]
    root = ET.fromstring(pictures.loss_curve(records))
    (line,) = root.iter("{http://www.w3.org/2000/svg}polyline")
    (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in line.attrib["points"].split())
    (dot,) = root.iter("{http://www.w3.org/2000/svg}circle")
    assert x1 < x2 == float(dot.attrib["cx"])
    assert y1 < float(dot.attrib["cy"]) < y2, "a lower loss is further down"
    assert float(dot.attrib["cy"]) == pytest.approx((y1 + y2) / 2, abs=0.1)


def test_held_out_curves_go_through_every_evaluation(pictures: ModuleType) -> None:
    records = [{"step": step, "loss": 3.0, **({} if step % 2 else {"val_loss": 4.0 - 0.2 * step})} for step in range(6)]
    root = ET.fromstring(pictures.held_out_curves({"one": records, "other": records[:4]}))
    lengths = [len(line.attrib["points"].split()) for line in root.iter("{http://www.w3.org/2000/svg}polyline")]
    assert lengths == [3, 2]


def test_the_overlap_has_a_box_for_each_section_and_sum(pictures: ModuleType) -> None:
    sections = [(name, (float(n), n + 1.0)) for n, name in enumerate(("forward", "backward", "reduce", "optimizer"))]
    sums = [(1.0, 1.5), (1.2, 2.0), (1.6, 1.8)]
    profiles = [Profile(rank, sections, sums, [(1.5, 2.0)]) for rank in range(2)]
    root = ET.fromstring(pictures.overlaps(profiles))
    boxes = [re.findall(r"M([\d.]+) (\d+)", path.attrib["d"]) for path in root.iter("{http://www.w3.org/2000/svg}path")]
    assert [len(result) for result in boxes] == [1, 1, 1, 1, 3] * 2
    (first_x, first), (_, second), (third_x, third) = boxes[4]
    assert first == third != second, "sums at the same time are in lanes of their own"
    assert float(boxes[1][0][0]) == float(first_x) < float(third_x)
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert sum("for 50% of their time" in (text or "") for text in texts) == 2


def test_the_timeline_has_a_box_for_each_computation(pictures: ModuleType) -> None:
    kinds: tuple[Kind, ...] = ("forward", "weight", "backward")
    spans = [Span(kind == "backward", Action(kind, 0, 7), float(n), n + 1.0) for n, kind in enumerate(kinds)]
    root = ET.fromstring(pictures.pipelines([("title", spans)]))
    boxes = [path.attrib["d"].count("M") for path in root.iter("{http://www.w3.org/2000/svg}path")]
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert boxes == [1, 1, 1]
    assert texts.count("7") == 3
    assert {"title", "rank 0", "rank 1", "forward", "backward", "weight gradients"} <= set(texts)
