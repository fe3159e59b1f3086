"""A port that a test is given is given to no other test process, and nothing listens there."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.support import ROOT, processes

OTHER = """
import sys
from tests.support import processes
processes.FIRST_PORT, processes.LAST_PORT = map(int, sys.argv[1:])
print(processes.free_port(), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(
    sys.platform != "linux", reason="ports are reserved by abstract socket names, which Linux alone has"
)
def test_of_three_ports_one_is_taken_and_one_is_reserved_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = processes.free_port()
    processes._reserved.pop().close()  # so that nothing but the server says so
    with socket.create_server(("127.0.0.1", taken)):
        first, last = taken - 1, taken + 2
        monkeypatch.setattr(processes, "FIRST_PORT", first)
        monkeypatch.setattr(processes, "LAST_PORT", last)
        argv = (sys.executable, "-c", OTHER, str(first), str(last))
        with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            theirs = int(other.stdout.readline())
            ours = processes.free_port()
            assert {taken, theirs, ours} == {first, taken, taken + 1}
            other.communicate(timeout=60)
