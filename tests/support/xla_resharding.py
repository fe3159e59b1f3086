"""A process with an XLA device that goes on from what other layouts saved on gloo.

python -m tests.support.xla_resharding FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from nxtrain.backends import open_backend
from nxtrain.train.run import train_on
from tests.support.resharding import LAYOUTS, SAVED, continued

ALONE = {"tp": 1, "dp": 1}


def main(folder: Path) -> None:
    """Continue each run of a folder."""
    backend = open_backend("xla")
    for name in LAYOUTS:
        checkpoint = folder / name / "checkpoints" / f"step-{SAVED:08d}"
        train_on(backend, continued(folder / f"xla-{name}", ALONE, folder / "rows.npy", checkpoint), "this test")
    backend.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
