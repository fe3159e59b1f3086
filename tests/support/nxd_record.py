"""Record the courses of NeuronX Distributed's own Llama, or compare them with those recorded.

    python -m tests.support.nxd_record MODELING_LLAMA_NXD [--write]

Needs NeuronX Distributed and what its example imports; `MODELING_LLAMA_NXD` is the example's model. Exit code 1: a
course is not what its case says, or not what is recorded; then nothing is written.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from importlib.metadata import version
from pathlib import Path

from tests.support import nxd_oracle
from tests.support.nxd_golden import (
    CASES,
    FILE,
    SOURCE,
    Case,
    Course,
    Distance,
    bound,
    content,
    our_course,
    our_plan,
    recorded,
    token_file,
)
from tests.support.ranks import RankPool
from tests.support.runs import train_rank

PACKAGES = ("torch", "torch-xla", "transformers")


def record(pool: RankPool, case: Case, example: Path) -> Course:
    """Course of NeuronX Distributed, which all ranks must report alike."""
    first, *others = pool.run(case.world, nxd_oracle.train, case, example)
    assert all(other == first for other in others), f"the ranks report different courses: {[first, *others]}"
    course: Course = first
    return course


def contradictions(nxd: Mapping[str, Course], ours: Mapping[str, Course]) -> Iterator[str]:
    """Contradictions to calling a case exact, or defective."""
    for name, case in CASES.items():
        distance = Distance.between(nxd[name], ours[name])
        exact = distance.within(bound(case, nxd))
        if exact == bool(case.defect):
            yield f"{name}: {distance} from ours; recorded as {case.defect or 'exact'}"


def changes(nxd: Mapping[str, Course]) -> Iterator[str]:
    """Courses that are not those recorded."""
    for name, case in CASES.items():
        distance = Distance.between(nxd[name], recorded()[name])
        if not distance.within(bound(case, recorded())):
            yield f"{name}: {distance} from what is recorded"


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.nxd_record", description=__doc__.partition("\n")[0])
    parser.add_argument("example", type=Path, help=f"{SOURCE['model']} of {SOURCE['repository']}")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} instead of comparing with it")
    options = parser.parse_args()
    nxd, ours = {}, {}
    with tempfile.TemporaryDirectory() as folder, closing(RankPool()) as pool:
        tokens = token_file(Path(folder))
        for name, case in CASES.items():
            nxd[name] = record(pool, case, options.example)
            pool.run(1, train_rank, our_plan(case.alone, Path(folder) / name, tokens))
            ours[name] = our_course(Path(folder) / name)
            distance = Distance.between(nxd[name], ours[name])
            print(f"{name:20} from ours: loss {distance.loss:.1e}  norm {distance.norm:.1e}", flush=True)
    wrong = [*contradictions(nxd, ours), *([] if options.write else changes(nxd))]
    print(*wrong, sep="\n", file=sys.stderr)
    if options.write and not wrong:
        write(nxd)
    return 1 if wrong else 0


def write(nxd: Mapping[str, Course]) -> None:
    """Write the file, one line per list of numbers."""
    text = json.dumps(content(nxd, {name: version(name) for name in PACKAGES}), indent=2)
    text = re.sub(
        r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"), text
    )
    FILE.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
