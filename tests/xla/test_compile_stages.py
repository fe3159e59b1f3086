"""Two pretended Trainium machines with a pipeline stage each: each compiles, writes and needs what is its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from torch.distributed import TCPStore

from nxtrain.tools.compile.cache import Cache
from nxtrain.tools.compile.entries import CacheKey
from nxtrain.tools.compile.manifest import GraphManifest, read_manifest
from tests.support import ROOT
from tests.support.neuron_machine import assert_real, command, install, rank_variables
from tests.support.processes import Started, free_port
from tests.support.xla_processes import start

CONFIG = ROOT / "configs/tiny_cpu.toml"


class Machine(NamedTuple):
    """A machine, and what is on it."""

    folder: Path
    env: dict[str, str]

    @property
    def cache(self) -> Cache:
        return Cache(self.folder / "cache")

    @property
    def values(self) -> list[str]:
        """A pipeline of two stages over two machines."""
        shared = self.folder.parent
        return [
            *("backend.name=neuron", "cluster.instance=trn1.32xlarge", "cluster.nodes=2", "parallel.pp=2"),
            *("model.config.vocab_size=300", f"compile.cache_dir={self.folder / 'cache'}", "train.steps=2"),
            *(f"compile.manifest={shared / '{name}.json'}", f"run.dir={shared / 'run'}", "compile.on_miss=stop"),
            *("data.source=tokens", f"data.path={shared / 'rows.npy'}", "data.validation_fraction=0"),
            *("train.seq_len=16", "train.global_batch=2", "train.micro_batch=1", "train.eval_every=0"),
            *("optim.warmup_steps=0", "checkpoint.every=0", "metrics.tensorboard=false", "metrics.progress=false"),
        ]

    def compile(self, first_node: str) -> Started:
        argv = ("compile", str(CONFIG), *self.values, "--nproc=1", f"--first-node={first_node}")
        return start(command, self.env, *argv, env=self.env, log=self.folder / "compile.log")

    def train(self, rank: int, port: int) -> Started:
        """Start `nxtrain train` as the one rank of this machine, which holds the stage of that number."""
        env = {**self.env, **rank_variables(rank, 2, port, nodes=2)}
        argv = ("train", str(CONFIG), *self.values)
        return start(command, env, *argv, env=env, log=self.folder / f"rank-{rank}.log")


class Cluster(NamedTuple):
    """Two machines with everything compiled, the one of the first stage before the other."""

    machines: list[Machine]
    manifests: list[GraphManifest]
    said: list[str]

    def run(self, first: int) -> tuple[list[int], list[str]]:
        """Exit codes and lines of a run on both, of which one holds the first stage."""
        store = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        nodes = (first, 1 - first)
        ranks = [self.machines[node].train(rank, store.port) for rank, node in enumerate(nodes)]
        ended = [rank.ended(200) for rank in ranks]
        return [process.code for process in ended], [process.printed for process in ended]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    shared = tmp_path_factory.mktemp("cluster")
    np.save(shared / "rows.npy", np.random.default_rng(0).integers(0, 300, (64, 17), dtype=np.uint16))
    machines = []
    for name in ("a", "b"):
        folder = shared / name
        folder.mkdir()
        machines.append(Machine(folder, {**install(folder), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}))
    where = f"127.0.0.1:{free_port()}"
    compiling = [machine.compile(where) for machine in machines]
    ended = [process.ended(200) for process in compiling]
    said = [item.printed for item in ended]
    assert [item.code for item in ended] == [0, 0], "\n\n".join(text[-5000:] for text in said)
    for machine in machines:
        assert_real(machine.folder, processes=1)
    stages = [int(re.findall(r"graphs of pipeline stage (\d) of 2 are in", text)[0]) for text in said]
    places = sorted((0, 1), key=stages.__getitem__)
    manifests = [read_manifest(shared / f"tiny_cpu.stages-{stage}.json") for stage in (0, 1)]
    return Cluster([machines[at] for at in places], manifests, [said[at] for at in places])


def test_each_machine_writes_the_graphs_of_its_own_stage(cluster: Cluster) -> None:
    shared = cluster.machines[0].folder.parent
    assert sorted(file.name for file in shared.glob("*.json")) == ["tiny_cpu.stages-0.json", "tiny_cpu.stages-1.json"]
    graphs = [{CacheKey(m.build.compiler, graph.module) for graph in m.graphs} for m in cluster.manifests]
    for stage, machine in enumerate(cluster.machines):
        assert cluster.manifests[stage].stages == (stage,)
        assert machine.cache.done() == graphs[stage]
        total = len(graphs[stage])
        words = f"all {total} graphs of pipeline stage {stage} of 2 are in {machine.cache}, {total} of them new, "
        assert words in cluster.said[stage]
    assert graphs[0] - graphs[1]
    assert graphs[1] - graphs[0]


def test_a_run_starts_where_each_machine_holds_the_stage_that_it_compiled(cluster: Cluster) -> None:
    codes, said = cluster.run(first=0)
    assert codes == [0, 0], "\n\n".join(text[-5000:] for text in said)
    assert "Call compiler" not in "".join(said)
    assert "warning: " not in "".join(said)


def test_a_machine_that_holds_another_stage_now_lacks_the_graphs_of_that_one(cluster: Cluster) -> None:
    codes, said = cluster.run(first=1)
    assert codes == [5, 5], "\n\n".join(text[-5000:] for text in said)
    own, other = (len(manifest.graphs) for manifest in cluster.manifests)
    for stage, (text, total) in enumerate(zip(said, (own, other), strict=True)):
        cache = cluster.machines[1 - stage].cache
        assert re.search(rf"{cache} lacks \d of the {total} graphs of tiny_cpu, pipeline stage {stage} of 2, ", text)
        assert "Call compiler" not in text
