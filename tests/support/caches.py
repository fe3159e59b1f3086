"""Compile caches in the compiler's layout, and a stand-in for the compiler that keeps its order of writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from nxtrain.tools.compile.entries import DONE, LOCK, LOG, NEFF, CacheKey

COMPILER = "neuronxcc-2.23.6484.0+3b612583"

# A rank: waits for another's empty lock, has the graph compiled under its own, then writes the marker and drops the
# lock. Only the compiler's command line names the entry. Neither imports more than it must: a race starts many.
_RANK = """
import os, sys, time
folder, compiler, pause = os.environ["FOLDER"], os.environ["COMPILER"], os.environ["PAUSE"]
lock, done = os.path.join(folder, "model.hlo_module.pb.lock"), os.path.join(folder, "model.done")
while not os.path.exists(done):
    os.makedirs(folder, exist_ok=True)
    try:
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
    except (FileExistsError, FileNotFoundError):
        time.sleep(0.02)
        continue
    if not os.path.exists(done):
        argv = [sys.executable, "-S", "-E", "-c", compiler, "neuronx-cc", folder, pause]
        code = os.spawnv(os.P_WAIT, sys.executable, argv)
        if code:
            sys.exit(code if code > 0 else 1)
        os.close(os.open(done, os.O_CREAT))
    os.unlink(lock)
"""
_COMPILE = """
import fcntl, os, sys, time
folder, pause = sys.argv[2], float(sys.argv[3])
alone = open(os.path.join(folder, "model.hlo_module.pb"), "a")
try:
    fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(3)
neff = os.path.basename(folder) * 500
for file, text in (("model.hlo_module.pb", "graph"), ("compile_flags.json", "[]"), ("model.neff", neff)):
    with open(os.path.join(folder, file), "w") as out:
        out.write(text[: len(text) // 2])
        out.flush()
        time.sleep(pause)
        out.write(text[len(text) // 2 :])
"""


TWO_COMPILERS = 3
"""Exit code of the stand-in when another works on the same entry, which the lock is there to prevent."""


def key(number: int, flags: str = "abc") -> CacheKey:
    """The key of a graph that a test invents; real hashes have 20 digits, too.

    Keys differ between processes: a lock counts as held while any process of the machine names its entry, and lanes run
    tests beside each other.
    """
    return CacheKey(COMPILER, f"MODULE_{os.getpid():010d}{number:010d}+{flags}")


def compiling(root: Path, of: CacheKey, pause_s: float = 0.0, keep: int | None = None) -> subprocess.Popen[bytes]:
    """Start to compile, in a process of its own that leads a session."""
    folder = str(root / of.compiler / of.module)
    env = {"FOLDER": folder, "COMPILER": _COMPILE, "PAUSE": str(pause_s)}
    argv, fds = [sys.executable, "-S", "-c", _RANK], () if keep is None else (keep,)
    return subprocess.Popen(argv, env=env, pass_fds=fds, start_new_session=True)


def compile_now(folder: Path, pause_s: float = 0.0) -> None:
    """Compile an entry that the caller has locked; only the compiler's command line names it."""
    argv = [sys.executable, "-S", "-E", "-c", _COMPILE, "neuronx-cc", str(folder), str(pause_s)]
    subprocess.run(argv, check=True)


def neff(of: CacheKey) -> bytes:
    """Content of the stand-in's NEFF of a graph."""
    return (of.module * 500).encode()


def add_pending(root: Path, of: CacheKey) -> Path:
    """A graph that was extracted and not compiled."""
    folder = root / of.compiler / of.module
    folder.mkdir(parents=True)
    (folder / "model.hlo_module.pb").write_bytes(b"graph")
    (folder / "compile_flags.json").write_bytes(b"[]")
    return folder


def add_done(root: Path, of: CacheKey) -> Path:
    """A compiled graph, as the stand-in makes it."""
    folder = add_pending(root, of)
    (folder / NEFF).write_bytes(neff(of))
    (folder / DONE).touch()
    return folder


def add_failed(root: Path, of: CacheKey) -> Path:
    """A graph that could not be compiled."""
    folder = add_pending(root, of)
    (folder / LOG).write_text("Failed compilation with exit code 70\nmore\n", encoding="utf-8")
    return folder


def add_locked(root: Path, of: CacheKey, owner: str = "") -> Path:
    """A graph under a lock; the compiler's locks name no owner."""
    folder = add_pending(root, of)
    (folder / LOCK).write_text(owner, encoding="utf-8")
    return folder
