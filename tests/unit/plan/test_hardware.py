"""Short names of machines, and files of one's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nxtrain.common.errors import ConfigError
from nxtrain.common.machines import ALIASES, MACHINES
from nxtrain.plan.hardware import find_machine, read_machines

ASKED = ("trn1.2xl", "trn1.32xl", "trn1n", "trn2.3xl", "trn2.48xl", "trn2u", "trn3", "p4d", "p4de", "p5", "p5e", "p5en")
OWN = """
["my box"]
devices = 4
device_bytes = 48_000_000_000
device_flops = 1e14
memory_bytes_s = 9e11
link_bytes_s = 3e10
network_bytes_s = 0
host_bytes = 256_000_000_000
host_threads = 64
"""


@pytest.mark.parametrize("name", [*ASKED, "trn1", "trn2", "g5", "g5.2xl", "g6e", "g6e.12xl"])
def test_short_names_are_known(name: str) -> None:
    assert find_machine(name) is MACHINES[ALIASES.get(name, f"{name}arge")]


def test_an_unknown_instance_gets_the_nearest_names() -> None:
    with pytest.raises(ConfigError, match=r"did you mean trn1\.32xl"):
        find_machine("trn1.32xlrge")
    with pytest.raises(ConfigError, match=r"did you mean .*p5"):
        find_machine("p6")


def test_a_machine_of_ones_own_is_read(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(OWN, encoding="utf-8")
    (machine,) = read_machines(file).values()
    assert (machine.name, machine.kind, machine.devices, machine.price_usd_h) == ("my box", "own", 4, None)
    assert "no price_usd_h" in machine.price_note
    assert find_machine("my box", {"my box": machine}) is machine


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OWN.replace("devices = 4", "devices = 0"), "devices"),
        (OWN.replace("devices = 4", "devices = true"), "devices"),
        (OWN.replace("devices = 4", "devices = 4.5"), "devices = a whole number, 1 to 1048576"),
        (OWN.replace("devices = 4", "devices = 9_000_000"), "devices"),
        (OWN.replace("host_bytes = 256_000_000_000", ""), r"missing, and has no default\n.*add host_bytes = a whole"),
        (OWN + 'kind = "hoper"\n', "did you mean hopper"),
        (OWN + "kind = 5\n", "known: trn1, "),
        (OWN.replace("device_flops = 1e14", 'device_flops = "fast"'), "device_flops"),
        (OWN.replace("device_flops = 1e14", "device_flops = inf"), "device_flops"),
        (OWN.replace("device_flops", "device_flop"), "device_flops"),
        (OWN.replace("= 3e10", "= 1e-9"), r"link_bytes_s = a number, 0, or 1e-06 to 1e\+200"),
        (OWN + "price_usd_h = 1e300\n", "price_usd_h = a number, 0 to 1000000000"),
        ("a = " + "[" * 100_000, "is not valid TOML"),
        (OWN.replace("link_bytes_s = 3e10", "link_bytes_s = 0"), "several devices"),
        ("devices = 4\n", "a machine is a table"),
        ("", "has no machine"),
        ("[", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_key(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "own.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=expected):
        read_machines(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_machines(tmp_path / "absent.toml")


@pytest.mark.parametrize("cell", [line.partition(" =")[0] for line in OWN.splitlines()[2:]] + ["price_usd_h"])
def test_every_cell_has_bounds(cell: str, tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    rest = "".join(f"{line}\n" for line in OWN.splitlines() if not line.startswith(f"{cell} "))
    for value in ("nan", "inf", "-inf", "-1", "-1e-9", "1e201", "1e308", "[]", "true", '"1"', "1979-05-27", "{a = 1}"):
        file.write_text(f"{rest}{cell} = {value}\n", encoding="ascii")
        with pytest.raises(ConfigError) as raised:
            read_machines(file)
        assert re.search(rf"{cell} .*{cell} = a (whole )?number, .*\d to \d", str(raised.value), re.DOTALL), value
