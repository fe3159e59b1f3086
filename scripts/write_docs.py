"""Write the generated parts of docs/: `python scripts/write_docs.py`.

The keys of docs/configuration.md come from the schema, and the files of docs/architecture.md from module docstrings.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    """Write the generated pages that changed, and print their names."""
    from tests.support.generated_docs import pages

    for path, text, wanted in pages():
        if text != wanted:
            path.write_text(wanted, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
