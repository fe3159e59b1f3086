"""Instances of the table, and instances that only their driver describes."""

from __future__ import annotations

from pathlib import Path

import pytest

from nxtrain.backends.neuron.hardware import CHIPS, EFA, INSTANCES, PRODUCT_NAME, this_machine
from nxtrain.common.machines import GIB


def described(root: Path, product: str, kind: str, chips: int, efa_devices: int = 0) -> Path:
    """Root of a system's description of its devices, as the driver and the firmware write it."""
    files = {PRODUCT_NAME: product}
    for number in range(chips):
        files[CHIPS / f"neuron{number}/info/architecture/instance_type"] = kind
    for file, text in files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(f"{text}\n", encoding="ascii")
    for number in range(efa_devices):
        (root / EFA / f"rdmap{number}").mkdir(parents=True)
    return root


def test_the_quickstarts_machine_has_one_chip_of_four_logical_cores(tmp_path: Path) -> None:
    result = this_machine(described(tmp_path, "trn2.3xlarge", "Trn2", 1))
    assert result == INSTANCES["trn2.3xlarge"]
    assert (result.devices, result.physical_cores, result.device_bytes, result.measured) == (4, 2, 24 * GIB, False)


@pytest.mark.parametrize(("product", "kind"), [("trn3.48xlarge", "Trn3"), ("trn3pds98.3xlarge", ""), ("", "Trn3")])
def test_a_trn3_is_what_its_driver_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, product: str, kind: str
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 192)
    result = this_machine(described(tmp_path, product, kind, 16, efa_devices=16))
    assert result is not None
    assert (result.name, result.target, result.devices, result.measured) == (product or "trn3", "trn3", 64, True)
    assert (result.device_bytes, result.device_flops) == (36 * GIB, 671e12 / 4)
    assert (result.host_threads, result.efa_devices) == (192, 16)


@pytest.mark.parametrize(
    ("product", "kind", "chips"), [("m5.large", "", 0), ("trn3.48xlarge", "", 0), ("x", "Inf2", 6)]
)
def test_a_machine_without_chips_of_a_known_kind_is_none(tmp_path: Path, product: str, kind: str, chips: int) -> None:
    assert this_machine(described(tmp_path, product, kind, chips)) is None
