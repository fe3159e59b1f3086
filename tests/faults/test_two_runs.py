"""A second start in the folder of a run that lives is refused, and disturbs nothing; one after its death is not."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from nxtrain.common.errors import BackendError
from nxtrain.common.testing.fault_points import VARIABLE
from tests.support.command_ranks import until
from tests.support.commands import start, trained, write_config
from tests.support.runs import course


def test_the_second_is_refused_while_the_first_lives(tmp_path: Path, straight: list[dict[str, Any]]) -> None:
    write_config(tmp_path)
    (tmp_path / "first").mkdir()
    armed = {VARIABLE: "hang@0:7:fwd"}
    first = start(tmp_path / "first", "train", tmp_path / "config.toml", environ=armed)
    try:
        while len(course(tmp_path / "run") if (tmp_path / "run/metrics.jsonl").exists() else []) < 6:
            assert first.is_alive()
            time.sleep(0.05)
        verified = tmp_path / "run/checkpoints/step-00000004/verified"
        until(verified.exists, 60.0, lambda: "the first run verifies its checkpoint behind its steps")
        before = {path: path.read_bytes() for path in (tmp_path / "run").glob("checkpoints/*/*")}
        output = trained(tmp_path, code=BackendError.exit_code)
        assert f"is in use by process {first.pid} on " in output
        assert "Traceback" not in output
        assert {path: path.read_bytes() for path in (tmp_path / "run").glob("checkpoints/*/*")} == before
    finally:
        first.kill()
        first.join()
    assert first.exitcode == -signal.SIGKILL
    output = trained(tmp_path)
    assert "continues after step 4" in output
    assert course(tmp_path / "run") == straight
