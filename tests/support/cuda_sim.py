"""A pretended GPU: torch's CUDA wheel on stubs of the CUDA runtime, cuBLAS, cuDNN, NCCL and the driver.

Kernels do nothing. Dispatcher, allocator, autograd, NCCL process groups, FSDP2, Inductor, Triton and ptxas are real.
The stubs, `tests/cuda_sim/device`, are preloaded into a process of its own, which plays cases one after the other. They
record launches, copies, waits, synchronizations, collectives and allocations.

    def body() -> Record:                      # in the other process
        with opened_gpu() as backend:
            with recorded() as record:
                train_step(...)
        return record

    def test_a_step(gpu: SimulatedGpu) -> None:
        assert gpu.run(body).host_waits == []
"""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import pickle
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest.mock import patch

from tests.support import ROOT
from tests.support.processes import AGENT_STORE, patient_s, rank_variables

SOURCES = ROOT / "tests" / "cuda_sim" / "device"
LIBRARY, DRIVER = "libcuda_sim.so", "libcuda.so.1"
LIMIT_S = patient_s(240)
REPORT_WAIT_S = patient_s(20)
"""Time that ranks have to end after another one has failed."""
T = TypeVar("T")


class Event(NamedTuple):
    """A call of the pretended GPU: kind, and fields as `record.h` and its callers write them."""

    kind: str
    fields: dict[str, str]


@dataclass(frozen=True)
class Record:
    """Events in the order of the calls. The list is filled when `recorded` ends."""

    events: list[Event] = field(default_factory=list)

    def of(self, *kinds: str) -> list[Event]:
        """Events of some kinds."""
        return [event for event in self.events if event.kind in kinds]

    def after(self, point: str) -> Record:
        """Events after a point that `mark` added."""
        points = [event.fields["name"] if event.kind == "point" else None for event in self.events]
        return Record(self.events[points.index(point) + 1 :])

    def parted(self, *sections: str) -> dict[str, Record]:
        """Events of sections that `marked` named, and all others as ""; an event is in the innermost section."""
        parts = {name: Record() for name in (*sections, "")}
        open_sections = [""]
        for event in self.events:
            name = event.fields["name"] if event.kind == "point" else ""
            if name.removeprefix("/") in sections:
                if name.startswith("/"):
                    open_sections.pop()
                else:
                    open_sections.append(name)
            else:
                parts[open_sections[-1]].events.append(event)
        return parts

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels launched, mangled as their compiler wrote them; products have names of cuBLAS."""
        return [event.fields["name"] for event in self.of("kernel")]

    @property
    def host_waits(self) -> list[Event]:
        """Synchronizations, and copies that make the host wait."""
        waits = [event for event in self.of("copy") if event.fields["way"] == "sync"]
        return self.of("sync") + waits + self.pageable_copies

    @property
    def pageable_copies(self) -> list[Event]:
        """Copies between the device and memory of the host that is not pinned, for which CUDA lets the host wait."""
        return [event for event in self.of("copy") if "pageable" in (event.fields["from"], event.fields["to"])]

    @property
    def copied_bytes(self) -> Counter[tuple[str, str]]:
        """Bytes copied by kind of source and destination: device, pinned or pageable."""
        total = Counter[tuple[str, str]]()
        for event in self.of("copy"):
            total[event.fields["from"], event.fields["to"]] += int(event.fields["bytes"])
        return total


def why_not() -> str:
    """Reason why no GPU can be pretended here; empty: one can."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return "a pretended GPU needs Linux on x86-64"
    lacking = [name for name in ("gcc", "nm") if not shutil.which(name)]
    if lacking:
        return f"a pretended GPU needs {' and '.join(lacking)}"
    if not (_torch_folder() / "lib" / "libtorch_cuda.so").exists():
        return f"a pretended GPU needs torch's wheel for CUDA, not {version('torch')}"
    if not _include_folders():
        return "a pretended GPU needs the headers of CUDA and NCCL that come with torch's wheel"
    return ""


def _torch_folder() -> Path:
    result = find_spec("torch")
    assert result is not None and result.origin is not None
    return Path(result.origin).parent


def _include_folders() -> list[Path]:
    """Folders with headers in the wheels that torch's needs; empty if one is absent."""
    site = _torch_folder().parent
    runtimes = [site / "nvidia" / name / "include" for name in ("cuda_runtime", "cu13")]
    headers = {
        "cuda.h": [site / "triton" / "backends" / "nvidia" / "include"],
        "cuda_runtime_api.h": runtimes,
        "nccl.h": [site / "nvidia" / "nccl" / "include"],
    }
    found: list[Path] = []
    for header, folders in headers.items():
        found += [folder for folder in folders if (folder / header).exists()][:1]
    return found if len(found) == len(headers) else []


@cache
def build() -> Path:
    """Folder with the stubs for torch as installed, compiled once per state of their sources."""
    sources = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(version("torch").encode())
    for path in (Path(__file__), *sources):
        digest.update(path.read_bytes())
    folder = ROOT / "build" / "cuda-sim" / digest.hexdigest()[:16]
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    wanted = _undefined(_torch_folder() / "lib")
    _link(made, LIBRARY, [SOURCES / "runtime.c", SOURCES / "libraries.c"], wanted)
    declared = (_include_folders()[0] / "cuda.h").read_text(encoding="utf-8")
    functions = {*re.findall(r"CUDAAPI (cu\w+)\(", declared)}
    _link(made, DRIVER, [SOURCES / "driver.c"], functions | {f"{name}_v2" for name in functions})
    (made / "libcuda.so").symlink_to(DRIVER)
    try:
        made.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(made)
    return folder


def _undefined(folder: Path) -> set[str]:
    """Functions of the CUDA libraries that torch's libraries call."""
    result = set[str]()
    for path in folder.glob("libtorch*.so"):
        result |= _symbols(path, "--dynamic", "--undefined-only")
    result |= _symbols(folder / "libc10_cuda.so", "--dynamic", "--undefined-only")
    kinds = ("cuda", "cublas", "cudnn", "nccl")
    return {name for name in result if name.startswith(kinds)}


def _symbols(path: Path, *options: str) -> set[str]:
    lines = subprocess.run(["nm", *options, path], check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line.split()}


def _link(folder: Path, name: str, sources: Sequence[Path], wanted: set[str]) -> None:
    """Compile a library that has the wanted functions, of which those that no source defines return success."""
    flags = ["-O1", "-w", "-fPIC", *(f"-I{path}" for path in _include_folders())]
    # The headers of Triton and of the runtime would declare these types twice.
    flags += [f"-D__CUDA_{kind}_H__" for kind in ("FP16", "BF16", "FP8")]
    objects = [folder / f"{path.stem}.o" for path in sources]
    defined = set[str]()
    for source, compiled in zip(sources, objects, strict=True):
        subprocess.run(["gcc", *flags, "-c", source, "-o", compiled], check=True)
        defined |= _symbols(compiled, "--extern-only", "--defined-only")
    rest = folder / f"{name}.c"
    stubs = [f"long {function}(void) {{ return 0; }}\n" for function in sorted(wanted - defined)]
    rest.write_text("".join(stubs), encoding="ascii")
    shared = ["-shared", f"-Wl,-soname,{name}", "-o", str(folder / name)]
    subprocess.run(["gcc", *flags, *objects, rest, *shared, "-ldl", "-lpthread"], check=True)


class SimulatedGpu:
    """A process with a pretended GPU, which calls functions one after the other.

    Args:
        settings: Environment variables of the device, such as `CUDA_SIM_CAPABILITY="100"`: see `runtime.c`.
    """

    def __init__(self, **settings: str) -> None:
        libraries = build()
        here, there = Pipe()
        variables = {
            "LD_PRELOAD": str(libraries / LIBRARY),
            "LD_LIBRARY_PATH": str(libraries),
            "TRITON_LIBCUDA_PATH": str(libraries),
            "OMP_NUM_THREADS": "1",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.cuda_sim", str(there.fileno())],
            cwd=ROOT,
            env={**os.environ, **variables, **settings},
            pass_fds=[there.fileno()],
        )
        there.close()
        self._pipe = here

    def run(self, body: Callable[..., T], *args: Any) -> T:
        """Call a function, importable by name, in the process, and return what it returns."""
        self._pipe.send((body, args))
        assert self._pipe.poll(LIMIT_S), f"{body.__name__}: not done in {LIMIT_S:g} s"
        done, result = self._pipe.recv()
        assert done, result
        return result  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.kill()
        self._process.wait()


def _serve(pipe: Connection) -> None:
    while True:
        try:
            body, args = pipe.recv()
        except EOFError:
            return
        _answer(pipe, body, args)


def _answer(pipe: Connection, body: Callable[..., object], args: tuple[Any, ...]) -> None:
    """Call a function, and send what it returns, or its failure."""
    try:
        answer: tuple[bool, Any] = (True, body(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(build() / LIBRARY))


def mark(point: str) -> None:
    """Add a point to the record that is being made."""
    _library().cuda_sim_mark(point.encode())


def lose_rank() -> None:
    """Let the pretended device wait for a lost rank, until a communicator is aborted."""
    _library().cuda_sim_lose()


def marked(section: str, call: Callable[..., T]) -> Callable[..., T]:
    """The same function, whose calls are a section of the record."""

    def within_section(*args: Any, **kwargs: Any) -> T:
        mark(section)
        try:
            return call(*args, **kwargs)
        finally:
            mark(f"/{section}")

    return within_section


@contextmanager
def recorded() -> Iterator[Record]:
    """Record what the pretended GPU is asked in this context, in a process of `SimulatedGpu`."""
    library = _library()
    record = Record()
    with tempfile.NamedTemporaryFile("r", encoding="ascii") as file:
        library.cuda_sim_record(file.name.encode())
        try:
            yield record
        finally:
            library.cuda_sim_record(None)
            record.events.extend(map(_event, file))


def _event(line: str) -> Event:
    thread, kind, *words = line.split()
    pairs = [word.partition("=") for word in (thread, *words)]
    return Event(kind, {name: value for name, _, value in pairs})


@contextmanager
def counted_splits() -> Iterator[None]:
    """Tell the size of each new group, which NCCL would count, to the communicator that is split from that of all."""
    from torch.distributed import distributed_c10d

    new_group = distributed_c10d._new_process_group_helper

    def new_group_of_size(size: int, *args: Any, **how: Any) -> Any:
        _library().cuda_sim_split(size)
        return new_group(size, *args, **how)

    with patch.object(distributed_c10d, "_new_process_group_helper", new_group_of_size):
        yield


WITHOUT_TRIAL = patch("nxtrain.backends.flash_ranges.failure", lambda *trial: "")
"""FlashAttention without its trial: no kernel computes, so a trial would judge what the memory holds."""


@contextmanager
def opened_gpu(rank: int = 0, world: int = 1, store: Any = None, settings: Any = None) -> Iterator[Any]:
    """The CUDA backend of one rank, in a process of `SimulatedGpu`; `settings` are `BackendSettings`.

    Ranks of a world come one after the other and share a store, in which each finds what those before it wrote. Their
    hosts have a group that does nothing.
    """
    from torch.distributed import Backend
    from torch.testing._internal.distributed import fake_pg

    from nxtrain.backends import c10d, open_backend

    join = c10d.C10dBackend._join

    def join_alone(self: Any, process_group: str, *args: Any, **how: Any) -> None:
        join(self, process_group.replace("gloo", "fake"), *args, **how)

    # As gloo, the group that does nothing takes no heed of NCCL's options.
    plugin = Backend._plugins["FAKE"]._replace(creator_fn=lambda common, _: fake_pg._create_fake_pg(common, None))
    variables = rank_variables(rank, world, port=1)
    with (
        counted_splits(),
        patch.dict(os.environ, variables),
        patch.dict(Backend._plugins, FAKE=plugin),
        patch.object(c10d, "join_rendezvous", lambda *_: store),
        patch.object(c10d.C10dBackend, "_join", join_alone),
        WITHOUT_TRIAL,
    ):
        backend = open_backend("cuda", settings)
        try:
            yield backend
        finally:
            backend.close()


def play(world: int, body: Callable[..., T], *args: Any) -> list[T]:
    """Call `body(backend, *args)` as each rank of a world, one after the other; returns what each returned."""
    return [result for result, _ in _played(world, body, *args)]


def play_recorded(world: int, body: Callable[..., object], *args: Any) -> list[Record]:
    """The same, and the record of each rank from the opening of its backend to the end."""
    return [record for _, record in _played(world, body, *args, records=True)]


def _played(world: int, body: Callable[..., T], *args: Any, records: bool = False) -> Iterator[tuple[T, Record]]:
    from torch.distributed import HashStore

    store = HashStore()
    for rank in range(world):
        with recorded() if records else nullcontext(Record()) as record, opened_gpu(rank, world, store) as backend:
            result = body(backend, *args)
        yield result, record


def play_together(world: int, port: int, body: Callable[..., T], *args: Any) -> list[T]:
    """Call `body(*args)` on each rank of a world at the same time; returns what each returned.

    Ranks are forks of this process, with a pretended GPU each, so that a process for them must not use its own. They
    meet in the store at a port, as of `tests.support.ranks`. Their hosts have a real group, so that they do wait for
    each other in a rendezvous, an agreement or an exchange of objects.
    """
    from torch.cuda import is_initialized

    assert not is_initialized(), "CUDA does not survive a fork"
    fork = multiprocessing.get_context("fork")
    processes = []
    ranks: dict[Connection, int] = {}
    for rank in range(world):
        here, there = Pipe()
        variables = {**rank_variables(rank, world, port), **AGENT_STORE}
        processes.append(fork.Process(target=_play_rank, args=(there, variables, body, args), daemon=True))
        processes[-1].start()
        there.close()
        ranks[here] = rank
    try:
        results, failures = _answers(ranks)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert not failures, "\n".join(failures)
    return [results[rank] for rank in range(world)]


def _answers(ranks: Mapping[Connection, int]) -> tuple[dict[int, Any], list[str]]:
    """Results of ranks, and failures of those that raise, die, or are not done in time."""
    waiting = dict(ranks)
    results: dict[int, Any] = {}
    failures: list[str] = []
    while waiting:
        ready = wait([*waiting], REPORT_WAIT_S if failures else LIMIT_S)
        answered = [pipe for pipe in waiting if pipe in ready]
        if not answered:
            failures.append(f"ranks {sorted(waiting.values())} are not done in time")
            break
        for pipe in answered:
            rank = waiting.pop(pipe)
            try:
                done, results[rank] = pipe.recv()
            except EOFError:
                done, results[rank] = False, "died"
            if not done:
                failures.append(f"rank {rank}:\n{results[rank]}")
    return results, failures


def _play_rank(pipe: Connection, variables: dict[str, str], body: Callable[..., object], args: tuple[Any, ...]) -> None:
    os.environ.update(variables)
    with counted_splits():
        _answer(pipe, body, args)


if __name__ == "__main__":
    from tests.support import cuda_sim  # whose functions and types are those that the bodies import

    cuda_sim._serve(Connection(int(sys.argv[1])))
