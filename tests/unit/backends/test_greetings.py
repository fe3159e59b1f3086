"""Process groups are made without gloo's lines, and nothing else that is written meanwhile is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from threading import Barrier, Thread

import pytest

from nxtrain.common.process.greetings import suppress_gloo_messages
from tests.support import ROOT
from tests.support.processes import free_port

GREETING = "[Gloo] Rank 0 is connected to 1 peer ranks."


def test_all_but_greetings_is_written_in_its_order(capfd: pytest.CaptureFixture[str]) -> None:
    os.write(1, b"before\n")
    with suppress_gloo_messages():
        os.write(1, f"one\n{GREETING}\ntwo [Gloo] Rank\n{GREETING}\nno end".encode())
        os.write(2, b"errors come at once\n")
        assert capfd.readouterr() == ("before\n", "errors come at once\n")
    os.write(1, b", after\n")
    assert capfd.readouterr().out == "one\ntwo [Gloo] Rank\nno end, after\n"


def test_an_exception_loses_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="x"), suppress_gloo_messages():
        os.write(1, b"why\n")
        raise ValueError("x")
    assert capfd.readouterr().out == "why\n"


def test_threads_and_nested_uses_share_one_stream(capfd: pytest.CaptureFixture[str]) -> None:
    inside, left = Barrier(2), Barrier(2)

    def other() -> None:
        with suppress_gloo_messages():
            inside.wait()
            left.wait()
            os.write(1, f"other\n{GREETING}\n".encode())

    thread = Thread(target=other)
    thread.start()
    inside.wait()
    with suppress_gloo_messages(), suppress_gloo_messages():
        os.write(1, f"{GREETING}\none\n".encode())
    left.wait()
    thread.join()
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "one\nother\nafter\n"


def test_a_stream_that_is_closed_stays_closed() -> None:
    script = "from nxtrain.common.process.greetings import suppress_gloo_messages as w\n"
    script += "import os\nwith w(): os.write(2, b'x')\n"
    script += "try: os.fstat(1)\nexcept OSError: os.write(2, b'closed')"
    command = ["bash", "-c", 'exec "$0" -c "$1" >&-', sys.executable, script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "xclosed")


RANK = """
import sys
import torch.distributed as dist
from nxtrain.common.distributed.c10d_collectives import C10dCollectives
from nxtrain.backends.base import BackendSettings
from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.distributed.host_group import HostGroup
from nxtrain.common.mesh import Mesh
backend = CpuBackend(BackendSettings(hang_timeout_s=60))
backend.background_group(60.0)
host = HostGroup(60.0)
mesh = Mesh.build(2, backend.rank, pp=2)
host.compare_among(mesh.all)
backend.lay_out(mesh)
backend.collectives.barrier()
print("a word", flush=True)
backend.close()
"""


def test_no_group_of_a_run_greets() -> None:
    placement = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={**os.environ, **placement, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [(rank.returncode, out) for rank, (out, _) in zip(ranks, said, strict=True)] == [(0, "a word\n")] * 2, said


def test_every_group_is_made_in_silence() -> None:
    makers = ("new_group(", "init_process_group(", "new_subgroups_by_enumeration(")
    unheld = []
    for path in sorted((ROOT / "nxtrain").rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            made = any(f"dist.{maker}" in line for maker in makers) and '"xla"' not in line
            if made and "suppress_gloo_messages()" not in lines[number - 1]:
                unheld.append(f"{path.name}:{number + 1}")
    assert unheld == []
