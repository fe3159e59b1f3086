"""Checks of machines that are healthy, and of machines with one fault each."""

from __future__ import annotations

import json
import re
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nxtrain.backends.neuron import sdk
from nxtrain.common.errors import ConfigError
from nxtrain.common.machines import INSTANCE_TYPES
from nxtrain.tools.doctor import collectives, examine
from nxtrain.tools.doctor.collectives import World, world_of
from nxtrain.tools.doctor.finding import Finding, Host
from nxtrain.tools.doctor.host import check_disk
from nxtrain.tools.doctor.packages import NEWEST_TORCH
from tests.support import ROOT, sick_machine
from tests.support.commands import in_process
from tests.support.processes import free_port
from tests.support.sick_machine import Machine

INSTALLED = {
    "torch": "2.9.0",
    "torch-xla": "2.9.0",
    "torch-neuronx": "2.9.0.2.12.22436+0f1d",
    "neuronx-cc": "2.23.6484.0+3b612583",
    "libneuronxla": "2.2.15515.0+50c26cbd",
}


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Versions of the installed packages, which a test may change; PyPI's placeholders have version 1.0."""
    versions = dict(INSTALLED)

    def distribution(name: str) -> SimpleNamespace:
        if name not in versions:
            raise PackageNotFoundError(name)
        text = "WRONG PACKAGE" if versions[name] == "1.0" else ""
        return SimpleNamespace(version=versions[name], read_text=lambda _: text)

    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/neuron0").touch()
    monkeypatch.setattr(sdk, "distribution", distribution)
    monkeypatch.setattr(sdk, "DEVICES", tmp_path / "dev")
    return versions


@pytest.fixture(autouse=True)
def generous(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Limits and space that suffice, whatever the machine of the tests has."""
    limits = {resource.RLIMIT_NOFILE: 1 << 20, resource.RLIMIT_MEMLOCK: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limits[kind], limits[kind]))
    usage = SimpleNamespace(total=1 << 40, free=1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.chdir(tmp_path)


def check(machine: Machine, *overrides: str, config: str = "", links: bool = False) -> list[Finding]:
    path = ROOT / config if config else None
    return [*examine.examine(path, overrides, collectives=links, world=None, host=machine.host)]


def faults(findings: Sequence[Finding]) -> dict[str, Finding]:
    for finding in findings:
        assert bool(finding.why) == bool(finding.fix) == (not finding.ok), finding
        assert finding.what
    return {finding.name: finding for finding in findings if not finding.ok}


CHECKS = {"instance", "devices", "processes", "ecc", "driver", "efa", "limits", "shm", "clock", "disk", "ports"}


def test_a_healthy_machine_has_no_fault_and_every_check_is_made(packages: dict[str, str], tmp_path: Path) -> None:
    result = check(sick_machine.trainium(tmp_path / "m"), links=True)
    assert faults(result) == {}
    assert {finding.name for finding in result} == {*CHECKS, "cache", "packages", "torch", "sdk", "loopback"}
    assert max(Counter(finding.name for finding in result).values()) == 1
    assert faults(check(sick_machine.gpus(tmp_path / "gpus"))) == {}


NORMAL = "A9FEA97B,169.254.169.123,4,1763800000.1,{},0.00001,0,1,0,0,0,0,16,{}"
SYSFS = "/sys/devices/virtual/neuron_device/neuron3"


def orphan(machine: Machine) -> None:
    machine.process(77, 1)
    machine.program("neuron-ls", sick_machine.neuron_ls(held={5: [(77, "python x")]}))


SICKNESSES: dict[str, tuple[Callable[[Machine], object], str, str]] = {
    "chips": (lambda m: m.program("neuron-ls", sick_machine.neuron_ls(14)), "devices", "14 of 16 .* missing: 14, 15"),
    "driver hangs": (
        lambda m: m.program("neuron-ls", "no driver", 1),
        "devices",
        "neuron-ls ended with exit code 1: no driver",
    ),
    "other form": (lambda m: m.program("neuron-ls", "{}"), "devices", "no list of devices"),
    "orphan": (
        orphan,
        "processes",
        r"process 77 \(python x\) holds devices 5",
    ),
    "dram": (lambda m: m.file(f"{SYSFS}/stats/hardware/mem_ecc_uncorrected/total", "2\n"), "ecc", "device 3: 2 uncorr"),
    "sram": (
        lambda m: m.file(f"{SYSFS}/stats/hardware/sram_ecc_uncorrected/total", "1\n"),
        "ecc",
        "device 3: 1 uncorr",
    ),
    "moved": (lambda m: m.file(f"{SYSFS}/hw/mem_ecc_uncorrected", "4\n"), "ecc", "device 3: 4 uncorrected"),
    "pair": (lambda m: m.file("/sys/module/neuron/version", "2.25.4.0\n"), "driver", "2.25.4.0 with runtime 2.30"),
    "no driver": (lambda m: (m.root / "sys/module/neuron/version").unlink(), "driver", "not loaded"),
    "efa": (lambda m: m.program("fi_info", sick_machine.fi_info(7)), "efa", "7 of 8 EFA devices"),
    "no efa": (lambda m: m.program("fi_info", "fi_getinfo: -61 (No data available)", 61), "efa", "No data available"),
    "no shm": (lambda m: (m.root / "dev/shm").rmdir(), "shm", "absent"),
    "clock off": (lambda m: m.program("chronyc", NORMAL.format("-3.0", "Normal")), "clock", "3.0 s off"),
    "no source": (lambda m: m.program("chronyc", NORMAL.format("0.0", "Not synchronised")), "clock", "no time source"),
    "chronyd": (lambda m: m.program("chronyc", "506 Cannot talk to daemon", 1), "clock", "Cannot talk to daemon"),
    "slow": (lambda m: m.program("nccom-test", sick_machine.NCCOM.replace("78.80", "0.90")), "loopback", "of 206 GB/s"),
    "links": (
        lambda m: m.program("nccom-test", "timeout", 1),
        "loopback",
        "nccom-test ended with exit code 1: timeout",
    ),
}
"""Faults: the change of a healthy machine, the check that finds it, and a pattern of its text."""


@pytest.mark.parametrize("sickness", SICKNESSES)
def test_one_fault_is_one_finding(sickness: str, packages: dict[str, str], tmp_path: Path) -> None:
    machine = sick_machine.trainium(tmp_path / "m")
    strike, name, pattern = SICKNESSES[sickness]
    strike(machine)
    result = faults(check(machine, links=True))
    assert set(result) == {name}
    assert re.search(pattern, result[name].what), result[name]


@pytest.mark.parametrize(
    ("changed", "name", "said"),
    [
        ({"torch-neuronx": "1.0"}, {"packages", "sdk"}, "PyPI's empty placeholder"),
        ({"neuronx-distributed": "1.0"}, {"packages", "sdk"}, "neuronx-distributed 1.0 is PyPI's"),
        ({"neuronx-cc": ""}, {"sdk"}, "neuronx-cc is not installed"),
        ({"torch": "2.8.0"}, {"torch", "sdk"}, "torch 2.8.0, torch-xla 2.9.0"),
        ({"neuronx-distributed": "0.30.1"}, {"nxd"}, "0.30.1 is not of 0.15 to 0.18"),
    ],
)
def test_a_wrong_package_is_found(
    changed: dict[str, str], name: set[str], said: str, packages: dict[str, str], tmp_path: Path
) -> None:
    packages.update(changed)
    for absent in [package for package, version in packages.items() if not version]:
        del packages[absent]
    result = faults(check(sick_machine.trainium(tmp_path / "m")))
    assert set(result) == name
    assert any(said in finding.what for finding in result.values()), result


def test_gpus_have_errors_and_processes_as_well(tmp_path: Path, packages: dict[str, str]) -> None:
    machine = sick_machine.gpus(tmp_path / "m", present="0 1 2 3 4 6 7", ecc="1", processes="GPU-2, 9, python")
    machine.process(9, 1)
    packages["torch"] = "2.9.0+cpu"
    result = faults(check(machine))
    assert set(result) == {"devices", "ecc", "processes", "torch"}
    assert "missing: 5" in result["devices"].what


@pytest.mark.parametrize(("version", "is_named"), [("2.15.0+cu132", False), ("2.16.0", True), ("3.0.0a0", True)])
def test_a_torch_that_is_newer_than_the_tested_ones_is_named_and_no_fault(
    version: str, is_named: bool, tmp_path: Path, packages: dict[str, str]
) -> None:
    packages.clear()
    packages["torch"] = version
    (result,) = (finding for finding in check(sick_machine.gpus(tmp_path / "m")) if finding.name == "torch")
    assert result.ok
    assert result.what.startswith(f"torch {version}")
    assert ("newer than 2.15, the newest release that nxtrain is tested with" in result.what) == is_named


def test_the_newest_torch_of_continuous_integration_is_the_one_that_doctor_names() -> None:
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    assert re.findall(r"--torch (\d+)\.(\d+)\.\d+", workflow) == [tuple(map(str, NEWEST_TORCH))]


def test_a_run_under_way_is_no_fault_until_another_is_to_start(packages: dict[str, str], tmp_path: Path) -> None:
    machine = sick_machine.trainium(tmp_path / "m")
    machine.program("neuron-ls", sick_machine.neuron_ls(held={chip: [(4, "python")] for chip in range(16)}))
    machine.process(4, 3)
    head = "  sl  local_address rem_address   st tx_queue\n"
    machine.file("/proc/net/tcp", f"{head}   0: 00000000:733C 00000000:0000 0A 00000000:00000000\n")
    assert faults(check(machine)) == {}
    result = faults(check(machine, config="configs/llama2_7b_trn1.toml"))
    assert set(result) == {"processes", "ports"}
    assert "port 29500" in result["ports"].what
    machine.file("/proc/net/tcp", f"{head}   0: 00000000:733C 0100007F:0050 01 00000000:00000000\n")  # no listener
    assert set(faults(check(machine, config="configs/llama2_7b_trn1.toml"))) == {"processes"}


def test_another_machine_than_the_configured_one_is_a_fault(packages: dict[str, str], tmp_path: Path) -> None:
    machine = sick_machine.trainium(tmp_path / "m")
    result = faults(check(machine, "cluster.instance=trn1n.32xlarge", config="configs/llama2_7b_trn1.toml"))
    assert set(result) == {"instance", "efa"}


def test_limits_and_space_that_do_not_suffice(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], tmp_path: Path
) -> None:
    machine = sick_machine.trainium(tmp_path / "m")
    usage = SimpleNamespace(total=64 << 20, free=900 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (65536, 65536))
    result = faults(check(machine))
    assert {name: finding.what.split()[0] for name, finding in result.items()} == {
        "limits": "memlock=65536",
        "shm": "/dev/shm",
    }
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    assert faults(check(machine))["limits"].what == "nofile=1024"
    # 7B: 6.7e9 parameters with state in bf16, six times.
    usage.total, usage.free = 1 << 40, 200 << 30
    assert faults(check(machine, config="configs/llama2_7b_trn1.toml"))["disk"].what.endswith("that are needed")


def test_a_cache_on_a_network_file_system_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], tmp_path: Path
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("36 35 0:31 / / rw - ext4 /dev/sda rw\n37 36 0:32 / /fsx rw - lustre a@tcp:/x rw\n")
    monkeypatch.setattr("nxtrain.config.cache_dir.MOUNTS", mounts)
    machine = sick_machine.trainium(tmp_path / "m")
    result = faults(check(machine, "compile.cache_dir=/fsx/graphs", config="configs/llama2_7b_trn1.toml"))
    assert set(result) == {"cache"}
    assert "lustre" in result["cache"].what


# The command


def answer(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> tuple[int, str, str]:
    monkeypatch.setattr(examine, "examine", lambda *_, **__: iter(findings))
    return in_process("doctor")


def test_the_exit_code_is_that_of_a_health_check(monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = Finding("a", True, "fine"), Finding("b", False, "broken", "it breaks", "mend it")
    assert answer(monkeypatch, good)[0] == 0
    code, said, _ = answer(monkeypatch, good, bad)
    assert code == 5
    assert said == f"ok    a           fine\nFAULT b           broken\n{'':18}why: it breaks\n{'':18}fix: mend it\n"


def test_the_links_of_this_machine_are_measured_and_all_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code, said, _ = in_process("doctor", str(ROOT / "configs/tiny_cpu.toml"), "--collectives", "--json")
    table: dict[str, Any] = json.loads(said)
    assert code == (0 if table["ok"] else 5)
    (result,) = [finding for finding in table["findings"] if finding["name"] == "loopback"]
    assert set(result) == {"name", "ok", "what", "why", "fix"}
    assert result["ok"], result
    assert result["what"].startswith("2 ranks on cpu: ")


def test_who_does_not_arrive_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from nxtrain.tools.doctor.collectives_rank import join

    def run(places: Sequence[dict[str, str]], backend: str, limit_s: float) -> list[dict[str, Any]]:
        for variable, value in places[0].items():
            monkeypatch.setenv(variable, value)
        return [join(backend, limit_s)]

    machine = Machine(tmp_path / "m")
    machine.program("scontrol", "n1\nn2\nn3")
    world = replace(world_of("127.0.0.1", 0, 3, machine.host), port=free_port())
    assert world.names == ("n1", "n2", "n3")
    monkeypatch.setattr(collectives, "_run_ranks", run)
    (result,) = collectives.check_collectives(machine.host, None, world, 0.3)
    assert not result.ok
    assert result.what == "2 of 3 did not arrive: n2 (rank 1), n3 (rank 2)"
    (result,) = collectives.check_collectives(machine.host, None, World("127.0.0.1", 1, 1, 2), 0.3)
    assert result.what == "1 of 2 did not arrive: rank 0 (127.0.0.1:1: Connection refused)"


NETWORKS = {"Socket": False, "Libfabric": True, "AWS Libfabric": True}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("instance", ["p5.48xlarge", "g5.2xlarge"])
def test_gpus_with_efa_whose_collectives_go_through_tcp_are_a_fault(
    monkeypatch: pytest.MonkeyPatch, network: str, instance: str
) -> None:
    """Between machines and within one; NCCL prints its choice in both."""
    machine = INSTANCE_TYPES[instance]
    result = {"missing": [], "error": "", "rows": [(1 << 24, 1e-4)], "device": "cuda:0", "network": network}
    monkeypatch.setattr(collectives, "_run_ranks", lambda environments, *_: [result] * len(environments))
    for world in (None, World("n1", 1, 0, 2)):
        links, *others = collectives.check_collectives(Host(), machine, world)
        assert links.ok
        assert [(one.name, one.ok) for one in others] == [("network", NETWORKS[network])] * bool(machine.efa_devices)


def test_a_rank_that_is_none_of_the_machines_is_refused() -> None:
    with pytest.raises(ConfigError, match="--rank 3 is too high for --world 3"):
        world_of("n1", 3, 3)
    with pytest.raises(ConfigError, match="'x' is not a port"):
        world_of("n1:x", 0, 3)
    code, out, err = in_process("doctor", "--first-node", "n1")
    assert (code, out, "add --collectives" in err.replace("\n", " ")) == (2, "", True)


def test_a_run_folder_that_is_a_file_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    assert "is not a folder" in check_disk(tmp_path / "run").what
    assert "is not a folder" in check_disk(tmp_path / "run/below").what
    assert check_disk(tmp_path / "other").ok


OLD_AND_NEW = {
    "Tesla V100-SXM2-16GB, 7.0": True,
    "Tesla T4, 7.5": True,
    "NVIDIA A100-SXM4-40GB, 8.0": False,
    "NVIDIA A10G, 8.6": False,
    "NVIDIA H100 80GB HBM3, 9.0": False,
    "NVIDIA B200, 10.0": False,
    "Quadro, of an old driver, [N/A]": False,
}


@pytest.mark.parametrize("params", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("gpu", OLD_AND_NEW)
def test_a_gpu_without_bf16_products_gives_one_line_that_is_no_fault(gpu: str, params: str, tmp_path: Path) -> None:
    machine = sick_machine.gpus(tmp_path / "gpus", capabilities=gpu)
    wide = {"bf16": "fp32_master", "fp16": "fp32_master", "fp32": "fp32"}[params]
    overrides = ["backend.name=cuda", f"precision.params={params}", f"precision.update={wide}", "run.dir=r"]
    result = check(machine, *overrides, config="configs/tiny_cpu.toml")
    lines = [finding for finding in result if finding.name == "bf16"]
    assert len(lines) == (OLD_AND_NEW[gpu] and params == "bf16")
    for finding in lines:
        name, _, capability = gpu.rpartition(", ")
        assert finding.ok
        assert finding.what.startswith(f"warning: {name} has compute capability {capability}, and products in bf16")


def test_a_driver_that_shows_no_compute_capability_is_no_fault(tmp_path: Path) -> None:
    machine = sick_machine.gpus(tmp_path / "gpus")
    machine.program("nvidia-smi", 'Field "compute_cap" is not a valid field to query.', 2)
    bf16 = ["backend.name=cuda", "precision.params=bf16", "precision.update=fp32_master"]
    result = check(machine, *bf16, config="configs/tiny_cpu.toml")
    assert not [finding for finding in result if finding.name == "bf16"]


@pytest.mark.parametrize(
    ("gpu", "recipe", "fix"),
    [
        ("NVIDIA A100-SXM4-40GB, 8.0", "tensorwise", "use precision.fp8=none"),
        ("NVIDIA L40S, 8.9", "rowwise", "use precision.fp8=tensorwise or none"),
        ("NVIDIA H100 80GB HBM3, 9.0", "rowwise", ""),
        ("NVIDIA H100 80GB HBM3, 9.0", "mxfp8", "use precision.fp8=tensorwise or rowwise or none"),
        ("NVIDIA B200, 10.0", "mxfp8", ""),
    ],
)
def test_a_gpu_too_old_for_a_recipe_of_float8_is_a_fault(gpu: str, recipe: str, fix: str, tmp_path: Path) -> None:
    machine = sick_machine.gpus(tmp_path / "gpus", capabilities=gpu)
    types = [f"precision.{value}" for value in ("params=bf16", "update=fp32_master", f"fp8={recipe}")]
    result = check(machine, "backend.name=cuda", *types, "run.dir=r", config="configs/tiny_cpu.toml")
    (finding,) = (each for each in result if each.name == "float8")
    assert (finding.ok, finding.fix) == (not fix, fix)


@pytest.mark.parametrize(
    ("backend", "tool"), [("cuda", "nvidia-smi"), ("neuron", "neuron-ls"), ("xla", ""), ("cpu", "")]
)
def test_a_run_without_the_devices_of_its_backend_is_a_fault_on_any_machine(
    tmp_path: Path, backend: str, tool: str
) -> None:
    """A machine that is not a known instance type, such as a laptop, may lack the devices, too."""
    laptop = Machine(tmp_path / "laptop")
    findings = faults(check(laptop, f"backend.name={backend}", config="configs/tiny_cpu.toml"))
    assert ("devices" in findings) == bool(tool)
    if tool:
        assert findings["devices"].what == f"no device for backend.name={backend}"
        assert tool in findings["devices"].fix
    assert "devices" not in faults(check(laptop))
