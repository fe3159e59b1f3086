"""A node's graphs lie on its own disk, under its own name. The reference for mounts is proc_pid_mountinfo(5)."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from nxtrain.common.errors import ConfigError
from nxtrain.config.cache_dir import MOUNTS, cache_folder, network_type
from nxtrain.config.operation_schema import CompileConfig

TABLE = r"""
22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p1 rw
40 22 0:45 / /fsx rw,relatime shared:20 - lustre 10.0.0.1@tcp:/abc rw,flock
41 40 259:2 / /fsx/local rw shared:21 - xfs /dev/nvme1n1 rw
42 22 0:46 / /home rw,relatime - nfs4 127.0.0.1:/ rw,vers=4.1
43 22 0:47 / /with\040blank rw - nfs 10.0.0.2:/x rw
44 22 0:48 / /twice rw - nfs 10.0.0.2:/x rw
45 44 259:3 / /twice rw master:3 propagate_from:2 - ext4 /dev/nvme2n1 rw
46 22 0:49 / /proc rw - proc proc rw
""".strip()


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/var/tmp/cache", ""),
        ("/fsx", "lustre"),
        ("/fsx/cache/node1", "lustre"),
        ("/fsx/local/cache", ""),
        ("/fsxx/cache", ""),
        ("/home/me/cache", "nfs4"),
        ("/with blank/cache", "nfs"),
        ("/twice/cache", ""),
    ],
)
def test_the_mount_that_holds_a_folder_decides(folder: str, kind: str) -> None:
    assert network_type(Path(folder), TABLE) == kind


def test_a_link_to_a_network_file_system_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/fsx")
    assert network_type(tmp_path / "link" / "cache", TABLE) == "lustre"


@pytest.mark.skipif(not MOUNTS.exists(), reason="this system has no /proc/self/mountinfo")
def test_this_machines_own_table_is_read() -> None:
    assert network_type(Path("/proc")) == ""


def test_the_host_is_filled_in_and_relative_folders_become_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    config = CompileConfig(cache_dir=Path("compile_cache/{host}"))
    assert cache_folder(config, host="ip-10-0-0-7", mounts="") == Path("/compile_cache/ip-10-0-0-7")
    assert cache_folder(config, mounts="").name == socket.gethostname().split(".")[0]
    assert CompileConfig().cache_dir == config.cache_dir


@pytest.mark.parametrize(
    ("cache_dir", "words"),
    [
        ("/fsx/{host}", ["/fsx/n1 is on a network file system (lustre)", "compile.allow_network=true"]),
        ("/data/{rank}/{host}", ["'/data/{rank}/{host}' has {rank}; only {host} is filled in"]),
        ("s3://bucket/prefix", ["is a bucket", "nxtrain cache sync"]),
    ],
)
def test_a_folder_that_cannot_serve_is_refused_with_the_way_out(cache_dir: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        cache_folder(CompileConfig(cache_dir=Path(cache_dir)), host="n1", mounts=TABLE)
    assert str(raised.value).startswith("compile.cache_dir: ")
    for word in words:
        assert word in str(raised.value)


def test_a_network_file_system_can_be_forced() -> None:
    config = CompileConfig(cache_dir=Path("/fsx/{host}"), allow_network=True)
    assert cache_folder(config, host="n1", mounts=TABLE) == Path("/fsx/n1")
