"""A lane names what it skipped once for each reason, and the closing summary of all lanes gets it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import SKIPS_FILE

ROOT = Path(__file__).parents[2]


def test_what_a_lane_skips_is_appended_with_its_reason(tmp_path: Path) -> None:
    file = tmp_path / "skips"
    file.write_text("of another lane\n", encoding="utf-8")
    argv = [sys.executable, "-m", "pytest", "tests/device/test_nxd_signatures.py", "-q", "-p", "no:cacheprovider"]
    env = {**os.environ, SKIPS_FILE: str(file)}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
    first, *lines = file.read_text(encoding="utf-8").splitlines()
    assert first == "of another lane"
    skipped = sum(int(line.split()[1]) for line in lines)
    assert f"{skipped} skipped" in done.stdout or not skipped
    for line in lines:
        lane, number, verdict, reason = line.split(maxsplit=3)
        assert (lane, verdict) == ("device", "skipped:")
        assert int(number) > 0
        assert "scripts/test.sh nxd --source" in reason
    assert len({line.split(maxsplit=3)[3] for line in lines}) == len(lines)


def test_the_script_of_the_lanes_prints_what_they_skipped() -> None:
    text = (ROOT / "scripts" / "test.sh").read_text(encoding="utf-8")
    assert f"{SKIPS_FILE}=" in text
    assert f'cat "${SKIPS_FILE}"' in text
