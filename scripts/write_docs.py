"""Write the generated parts of docs/: `python scripts/write_docs.py`.

docs/configuration.md gets its keys from the schema, docs/architecture.md its files from the docstrings of modules.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    """Write the pages that differ, and print their names."""
    from tests.support.generated_docs import pages

    for path, text, wanted in pages():
        if text != wanted:
            path.write_text(wanted, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
