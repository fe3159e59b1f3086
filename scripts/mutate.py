"""Put defects into copies of the source, one at a time, and run the tests that should notice: `scripts/mutate.py 1`.

Which tests those are stands in `COVERED` of tests/support/mutation.py. A seed draws the same mutants of the same source
each time, all kinds of defects in turn. One line is printed for each, and the share that was noticed for each folder.

Exit code 0 whatever survives; 1 if a test fails without any defect.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = [f"nxtrain/{name}" for name in ("parallel", "optim", "nn", "checkpoint")]


def main() -> None:
    """Draw mutants of each path and try them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int, help="draws the mutants")
    parser.add_argument("paths", nargs="*", default=FOLDERS, metavar="PATH", help=f"default: {' '.join(FOLDERS)}")
    parser.add_argument("--number", type=int, default=30, help="mutants of each path (default: 30)")
    parser.add_argument("--operator", action="append", default=[], help="only this kind of defect; may be repeated")
    parser.add_argument("--quick", action="store_true", help="run only the first selection of tests, without ranks")
    parser.add_argument("--limit-s", type=float, default=900.0, help="seconds of one selection at most (default: 900)")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write mutants, outcomes and scores there")
    options = parser.parse_args()

    from tests.support.mutation import Score, Tree, draw, play, preload

    chosen = {path: draw(ROOT, [path], options.number, options.seed, options.operator) for path in options.paths}
    if options.list:
        for drawn in (each for mutants in chosen.values() for each in mutants):
            print(drawn)
        return
    preload()
    scores: dict[str, Score] = {}
    records: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="nxtrain-mutants-") as folder:
        tree = Tree(ROOT, Path(folder))
        for path, mutants in chosen.items():
            scores[path] = Score()
            try:
                for drawn, outcome in play(tree, mutants, quick=options.quick, most_s=options.limit_s):
                    scores[path].outcomes.append(outcome)
                    print(f"{len(scores[path].outcomes)}/{len(mutants)} {drawn}: {outcome}", flush=True)
                    about = {name: getattr(drawn.mutant, name) for name in ("operator", "line", "before", "after")}
                    records.append({"path": drawn.path, **about, **asdict(outcome)})
            except RuntimeError as error:
                sys.exit(str(error))
    for path, score in scores.items():
        print(f"{path}: {score}")
    if options.json:
        shares = {path: {"noticed": score.noticed, "of": len(score.outcomes)} for path, score in scores.items()}
        options.json.write_text(json.dumps({"seed": options.seed, "scores": shares, "mutants": records}, indent=1))


if __name__ == "__main__":
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    main()
