"""Parts of docs/ that are written from the code: configuration keys, files, import layers, exit codes, SDK releases.

A part stands between two comments of its page, `begin: NAME` and `end: NAME`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from nxtrain.backends.neuron import torchneuron
from nxtrain.backends.neuron.sdk import RELEASES, install_command
from nxtrain.common.errors import StoppedBySignal
from nxtrain.config.schema import RunConfig
from nxtrain.config.show import keys
from nxtrain.launch.exit_codes import EXIT_CODES, ExitCode
from nxtrain.plan.inspection import inspect
from nxtrain.plan.memory import rank_bytes
from nxtrain.plan.presets import DATASETS, SHAPES, Dataset
from nxtrain.plan.speed import OTHER, SPEEDS, step_time
from tests.support import ROOT
from tests.support.published import Compared, compared, held_out, job_of, summary, with_context, with_experts

FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n", flags=re.DOTALL | re.MULTILINE)
GENERATED = re.compile(r"^<!-- begin: .*?^<!-- end: \w+ -->\n", flags=re.DOTALL | re.MULTILINE)
ABBREVIATION = re.compile(r"\b(et al|e\.g|i\.e)\.")


def markdown_pages() -> list[Path]:
    folders = ("configs", "models", "tests/faults", "tests/golden", "compile_cache")
    own = [path for folder in folders for path in sorted((ROOT / folder).glob("*.md"))]
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), *own]


def name(page: Path) -> str:
    """Path of a page below the repository."""
    return str(page.relative_to(ROOT))


def blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of every fenced block; commands have no language."""
    return [(result[1], result[2]) for result in FENCE.finditer(text)]


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


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = ROOT / "docs"


def key_tables() -> str:
    """Markdown tables of every configuration key, one for each section."""
    lines = list[str]()
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        assert isinstance(section, type)
        assert issubclass(section, BaseModel)
        title = (section.__doc__ or "").partition("\n")[0].partition(": ")[2]
        lines += ["", f"### [{name}]", "", title[:1].upper() + title[1:], "", "| key | type | default | meaning |"]
        lines.append("|---|---|---|---|")
        for key in keys():
            if key.name.partition(".")[0] == name:
                kind = ", ".join(f"`{choice}`" for choice in key.kind.split(" | ")) if " | " in key.kind else key.kind
                lines.append(f"| `{key.name}` | {kind} | {_cell(_code(key.default))} | {_cell(key.doc)} |")
    return "\n".join([*lines, ""])


def import_contracts() -> list[dict[str, Any]]:
    """Contracts of import-linter, as pyproject.toml has them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return contracts


def rooms() -> str:
    """Picture of the rooms of nxtrain, each above the rooms that it imports, with the first sentence of each."""
    (layers,) = (c["layers"] for c in import_contracts() if c["name"] == "Imports run one way")
    lines = ["```text"]
    for layer in layers:
        if layer == "__main__":
            continue
        for room in re.split(r" [|:] ", layer):
            folder = ROOT / "nxtrain" / room
            lines.append(f"{room:18}{_sentence(folder)}")
            lines += [f"  {inner.name:16}{_sentence(inner)}" for inner in sorted(folder.iterdir()) if _is_room(inner)]
        lines.append("")
    lines[-1] = "```"
    return "\n".join([*lines, ""])


def releases() -> str:
    """Table of the packages of each release of the Neuron SDK, with the command that installs them."""
    lines = ["", "| SDK | Python | torch | torch-neuronx | neuronx-cc | NxD |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {sdk} | {' to '.join(result.python)} | 2.9.0 | 2.9.0.{result.torch_neuronx} | {result.neuronx_cc} "
        f"| {result.neuronx_distributed} |"
        for sdk, result in RELEASES.items()
    ]
    lines += ["", "```text", install_command().partition(": ")[2], "```", ""]
    return "\n".join([*lines, "For TorchNeuron, on Ubuntu 26.04:", "", "```text", torchneuron.pip_command(), "```", ""])


def constants() -> str:
    """Table of the constants of predicted speed."""
    lines = [
        "",
        "| chip | products | attention | device link | network | overlap | basis |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, speed in {**SPEEDS, "other": OTHER}.items():
        shares = (speed.products, speed.attention, speed.link, speed.network, speed.overlap)
        lines.append(f"| {kind} | {' | '.join(f'{share:g}' for share in shares)} | {_cell(speed.basis)} |")
    return "\n".join([*lines, ""])


def published() -> str:
    lines = ["", "| run | devices | layout | published | predicted | error | use | source |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    return "\n".join([*lines, *(_published(result) for result in compared() if result.row["use"] != "outlier"), ""])


def outliers() -> str:
    """Table of published rows that are not reproduced."""
    lines = ["", "| run | devices | layout | published | predicted | error | reason | source |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    return "\n".join([*lines, *(_published(result) for result in compared() if result.row["use"] == "outlier"), ""])


def not_used() -> str:
    """Table of published rows that chose no constant, and the distribution of their errors."""
    lines = ["", "| rows | number | median error | within 25% | lowest | highest |", "|---|---|---|---|---|---|"]
    lines += [f"| {name} | {' | '.join(figures)} |" for name, *figures in summary(held_out())]
    lines += ["", "| run | devices | layout | published | predicted | error | added | source |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    return "\n".join([*lines, *map(_published, held_out()), ""])


def context() -> str:
    """Table of the rows with context parallelism."""
    lines = ["", "| run | devices | layout | published | predicted | error | added | source |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    return "\n".join([*lines, *map(_published, with_context()), ""])


def experts() -> str:
    """Table of the rows with experts."""
    lines = ["", "| run | devices | layout | published | predicted | error | added | source |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    return "\n".join([*lines, *map(_published, with_experts()), ""])


def _published(result: Compared) -> str:
    row, parallel = result.row, result.job.config.parallel
    chunks = f"pp {parallel.pp}" + (f" x {parallel.virtual_pp}" if parallel.virtual_pp > 1 else "")
    context = f"cp {parallel.cp}, " if parallel.cp > 1 else ""
    experts = f"ep {parallel.ep}, " if parallel.ep > 1 else ""
    degrees = f"tp {parallel.tp}, {context}{chunks}, dp {parallel.dp}, {experts}{parallel.shard}"
    layout = f"{degrees}, {row['seq_len']} tokens"
    devices = f"{result.job.nodes} x {row['instance']}"
    rates = f"{result.published:,.0f} | {result.predicted:,.0f} | {result.error:+.1%}"
    use = row.get("why") or row.get("use") or row.get("added", "before the constants")
    return f"| {row['name']} | {devices} | {layout} | {rates} | {use} | {row['source']} |"


def shapes() -> str:
    """Tables of models and data sets for plans."""
    lines = ["", "| model | parameters | source |", "|---|---|---|"]
    lines += [
        f"| `{name}` | {s.dimensions.num_params / 1e9:,.1f}e9 | {_cell(s.source)} |" for name, s in SHAPES.items()
    ]
    lines += ["", "| data set | tokens | bytes | bytes per token | source |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *(_data_set(name, result) for name, result in DATASETS.items()), ""])


def _data_set(name: str, result: Dataset) -> str:
    size, per_token = (
        (f"{result.bytes / 1e9:,.12g}e9", f"{result.bytes / result.tokens:.2f}") if result.bytes else ("", "")
    )
    return f"| `{name}` | {result.tokens / 1e9:,.12g}e9 | {size} | {per_token} | {_cell(result.source)} |"


def networks() -> str:
    """Seconds of a step by mode of sharding and by network: Llama 2 7B on 16 p5.48xlarge."""
    modes = ("none", "zero1", "grad_op", "full", "hybrid")
    head = " | ".join(f"`{mode}`" for mode in modes)
    lines = ["", f"| network of a machine | {head} |", "|---|---|---|---|---|---|"]
    for gigabits in (3200, 800, 400, 100):
        cells = [_step(mode, gigabits * 1e9 / 8) for mode in modes]
        lines.append(f"| {gigabits:,} Gb/s | {' | '.join(cells)} |")
    notes = "Seconds of a step of Llama 2 7B on 16 p5.48xlarge: 512 sequences of 4,096 tokens, one in a micro-batch."
    return "\n".join([*lines, "", notes, ""])


def _step(mode: str, network_bytes_s: float) -> str:
    row = {"model": "llama2-7b", "instance": "p5.48xlarge", "nodes": 16, "tp": 1, "pp": 1, "shard": mode}
    job = job_of({**row, "seq_len": 4096, "global_batch": 512, "remat": "selective"})
    job = replace(job, machine=replace(job.machine, network_bytes_s=network_bytes_s))
    fits = rank_bytes(job)[1].total <= job.machine.device_bytes
    return f"{step_time(job).step_s:.2f}{'' if fits else ', does not fit'}"


MEANINGS = {
    "gather": "the ranks exchange their shards; each has the unit's parameters whole",
    "forward": "the block's forward pass",
    "backward": "gradients of the block's inputs and parameters",
    "reduce": "gradients are summed over the ranks; each keeps its own shard",
}
"""Events of a sharded step, in words."""


def sharded_step() -> str:
    """Table of the events of a sharded step of a model with three blocks."""
    from nxtrain.tools.trace.step_trace import trace_step  # torch, which no other part needs

    overrides = ["parallel.shard=full", "parallel.dp=4", "train.micro_batch=4", "model.config.num_hidden_layers=3"]
    result = inspect(ROOT / "configs" / "tiny_cpu.toml", overrides)
    rows = [
        f"| {number} | {event} | {MEANINGS[event.split()[0]]} |"
        for number, event in enumerate(trace_step(result.resolved, result.job), 1)
    ]
    return "\n".join(["", "| | event | meaning |", "|---|---|---|", *rows, ""])


def exit_codes() -> str:
    """Table of exit codes, with the use of a new start."""
    lines = ["", "| code | meaning | restart? |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {kind.text} | {kind.meaning} | {kind.restart} |" for kind in EXIT_CODES), ""])


def restarts() -> str:
    """Table of the reactions of supervisors to exit codes."""
    lines = ["", "| exit code | `nxtrain launch` | Slurm | PyTorchJob | JobSet |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *map(_reactions, EXIT_CODES), ""])


def _reactions(kind: ExitCode) -> str:
    cells = [kind.text, "ranks start again", "the job is queued again", "the pod starts again", "all pods start again"]
    if not any(kind.codes):
        cells[1:] = ["done"] * 4
    elif not kind.helps:
        cells[1:] = ["ends", "the job ends", "the job fails", "the job fails"]
    elif StoppedBySignal.exit_code in kind.codes:
        cells[1], cells[4] = "ends", "the pod starts again, and is not counted"
    return f"| {' | '.join(cells)} |"


PARTS: dict[tuple[str, str], Callable[[], str]] = {
    ("configuration.md", "keys"): key_tables,
    ("architecture.md", "rooms"): rooms,
    ("parallelism.md", "step"): sharded_step,
    ("recovery.md", "exit_codes"): exit_codes,
    ("slurm_kubernetes.md", "restarts"): restarts,
    ("trainium.md", "releases"): releases,
    ("planning.md", "constants"): constants,
    ("planning.md", "published"): published,
    ("planning.md", "outliers"): outliers,
    ("planning.md", "held_out"): not_used,
    ("planning.md", "context"): context,
    ("planning.md", "experts"): experts,
    ("planning.md", "networks"): networks,
    ("planning.md", "shapes"): shapes,
}


def replaced(text: str, name: str, part: str) -> str:
    """A page with one generated part replaced."""
    pattern = rf"(<!-- begin: {name};[^\n]*-->\n).*?(<!-- end: {name} -->)"
    new, number = re.subn(pattern, lambda match: match[1] + part + match[2], text, flags=re.DOTALL)
    assert number == 1, f"the page has no place for {name}"
    return new


def pages() -> Iterator[tuple[Path, str, str]]:
    """Path of each page with generated parts, its text, and the text that the code asks for."""
    for file in dict.fromkeys(file for file, _ in PARTS):
        text = wanted = (DOCS / file).read_text(encoding="utf-8")
        for (of, name), write in PARTS.items():
            wanted = replaced(wanted, name, write()) if of == file else wanted
        yield DOCS / file, text, wanted


def _is_room(folder: Path) -> bool:
    return (folder / "__init__.py").exists()


def _sentence(folder: Path) -> str:
    doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""
