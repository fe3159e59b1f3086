"""Output of the tools of a machine, in the forms of their documentation, and in none."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable

import pytest

from nxtrain.tools.doctor.outputs import (
    Bandwidth,
    Devices,
    Holder,
    ToolOutputError,
    parse_chronyc,
    parse_fi_info,
    parse_nccl_network,
    parse_nccom_test,
    parse_neuron_ls,
    parse_nvidia_smi,
)
from tests.support import sick_machine


def test_neuron_ls_of_a_trn2_lists_devices_logical_cores_and_processes() -> None:
    command = "neuron-bench exec --run-as-cc-neff --..."
    process = {"pid": 113985, "command": command, "neuron_runtime_version": "2.0.0"}
    row: dict[str, object] = {
        "bdf": "cc:00.0",
        "cpu_affinity": "48-95,144-191",
        "numa_node": "1",
        "connected_to": [12, 3, 4, 1],
    }
    row |= {"nc_count": 4, "logical_neuroncore_config": 2, "memory_size": 103079215104}
    text = json.dumps([{**row, "neuron_device": n, "neuron_processes": [process]} for n in (0, 15)])
    result = parse_neuron_ls(text)
    assert result.numbers == (0, 15)
    assert result.holders == (Holder(113985, command, (0, 15)),)


def test_neuron_ls_of_one_chip_has_neighbours_that_are_null() -> None:
    row: dict[str, object] = {
        "neuron_device": 0,
        "bdf": "0000:00:1e.0",
        "cpu_affinity": "0-7",
        "numa_node": "-1",
        "connected_to": None,
    }
    row |= {"nc_count": 2, "memory_size": 34359738368, "neuroncore_ids": [0, 1], "neuron_processes": []}
    assert parse_neuron_ls(json.dumps([row])) == parse_neuron_ls(json.dumps({"instance": "x", "devices": [row]}))
    assert parse_neuron_ls(json.dumps([row])).numbers == (0,)


def test_nvidia_smi_lists_devices_errors_and_processes() -> None:
    result = parse_nvidia_smi(
        "0, 0\n1, [N/A]\n2, 3\n",
        "0, GPU-a\n1, GPU-b\n2, GPU-c\n",
        'GPU-b, 77, python\nGPU-c, 77, python\nGPU-a, 8, "a, b"\n',
    )
    assert result.numbers == (0, 1, 2)
    assert result.ecc == ((0, 0), (2, 3))
    assert result.holders == (Holder(8, "a, b", (0,)), Holder(77, "python", (1, 2)))


def test_the_network_of_nccl_is_the_last_that_it_names() -> None:
    head = "p5-1:7:19 [0] NCCL INFO "
    lines = [f"{head}NET/IB : No device found.", f"{head}Using network Socket", f"{head}Using network AWS Libfabric"]
    assert parse_nccl_network("\n".join(lines)) == "AWS Libfabric"
    assert parse_nccl_network("\r\n".join(lines[:2])) == "Socket"
    assert parse_nccl_network(lines[0]) == ""


def test_fi_info_shows_each_device_twice() -> None:
    assert parse_fi_info(sick_machine.fi_info(2)) == ("rdmap16s27", "rdmap17s27")
    assert parse_fi_info("") == ()


def test_tables_of_nccom_test_differ_in_columns() -> None:
    rows = parse_nccom_test(sick_machine.NCCOM)
    assert [row.size_bytes for row in rows] == [1024, 33554432]
    assert rows[1].time_s == pytest.approx(768e-6)
    assert rows[1].bus_bytes_s == pytest.approx(78.80 * 2**30)
    head = "size(B)    count(elems)    type    time:avg(us)    time:p25(us)    algbw(GB/s)    busbw(GB/s)"
    (row,) = parse_nccom_test(f"{head}\n 1024  256  fp32  24.00  23.00  0.04  0.03\n")
    assert [row.time_s, row.bus_bytes_s] == pytest.approx([24e-6, 0.03 * 2**30])


def test_chronyc_has_the_offset_unless_the_clock_has_no_source() -> None:
    line = "A9FEA97B,169.254.169.123,4,1763800000.1,-2.5,0.00001,0,1,0,0,0,0,16,{}"
    assert parse_chronyc(line.format("Normal")) == 2.5
    assert parse_chronyc(line.format("Not synchronised")) is None


def test_an_answer_that_is_nested_deeply_is_an_unknown_form() -> None:
    with pytest.raises(ToolOutputError, match="no list of devices"):
        parse_neuron_ls("[" * 100_000)


RECORDED: list[tuple[Callable[[str], object], str]] = [
    (parse_neuron_ls, sick_machine.neuron_ls(2, {1: [(5, "python")]})),
    (parse_nccom_test, sick_machine.NCCOM),
    (lambda text: parse_nvidia_smi(text, "0, GPU-a\n", "GPU-a, 7, python\n"), "0, 0\n1, [N/A]\n"),
    (lambda text: parse_nvidia_smi("0, 0\n", text, "GPU-a, 7, python\n"), "0, GPU-a\n1, GPU-b\n"),
    (lambda text: parse_nvidia_smi("0, 0\n", "0, GPU-a\n", text), 'GPU-a, 7, "a, b"\n'),
    (parse_fi_info, sick_machine.fi_info(2)),
    (parse_chronyc, "A9FEA97B,169.254.169.123,4,1763800000.1,-2.5,0.00001,0,1,0,0,0,0,16,Normal"),
]
GARBAGE = ("", "\u00b2", "nan", "inf", "1e999", "-1", "\0", "9" * 5000, "null", "[", '"', ",", "\n", "x", "time(us)")


def facts(result: object) -> set[tuple[object, ...]]:
    """Facts that an answer states, each apart, after a check that each is of the kind that the checks reckon with."""
    if isinstance(result, Devices):
        assert all(type(number) is int for number in result.numbers)
        assert all(errors >= 0 for _, errors in result.ecc)
        held = {("holder", holder.pid, device) for holder in result.holders for device in holder.devices}
        return {*(("device", number) for number in result.numbers), *held, *(("ecc", *pair) for pair in result.ecc)}
    if isinstance(result, float) or result is None:
        assert result is None or (math.isfinite(result) and result >= 0)
        return {("offset", result)}
    assert isinstance(result, tuple)
    for item in result:
        if isinstance(item, Bandwidth):
            assert math.isfinite(item.time_s)
            assert math.isfinite(item.bus_bytes_s)
        else:
            assert re.fullmatch(r"\S+", item)
    return {(item,) for item in result}


def read(parse: Callable[[str], object], text: str) -> set[tuple[object, ...]] | None:
    """Facts of a text; None: it is refused."""
    try:
        return facts(parse(text))
    except ToolOutputError:
        return None


@pytest.mark.parametrize(("parse", "recorded"), RECORDED)
def test_what_is_read_of_a_cut_answer_holds_the_whole_lines_and_no_device_beyond_the_cut(
    parse: Callable[[str], object], recorded: str
) -> None:
    whole = read(parse, recorded)
    assert whole
    for length in range(len(recorded)):
        result = read(parse, recorded[:length])
        if result is None:
            continue
        lines = read(parse, recorded[: recorded.rfind("\n", 0, length) + 1]) or set()
        assert lines <= result | {("offset", None)}
        assert lines <= whole
        is_name_cut = parse is parse_fi_info  # of the last device
        assert len(result) <= len(whole) + is_name_cut
    if recorded.startswith(("[", "{")):  # JSON that is cut is not JSON
        assert not any(read(parse, recorded[:length]) for length in range(len(recorded.rstrip())))


@pytest.mark.parametrize(("parse", "recorded"), RECORDED)
def test_a_garbled_word_is_refused_or_changes_its_own_line_alone(parse: Callable[[str], object], recorded: str) -> None:
    words = re.split(r"([^\w.()/-]+)", recorded)
    for number, bad in itertools.product(range(len(words)), GARBAGE):
        actual = read(parse, "".join((*words[:number], bad, *words[number + 1 :])))
        before, after = "".join(words[:number]), "".join(words[number + 1 :])
        others = before[: before.rfind("\n") + 1] + after.partition("\n")[2]
        expected = read(parse, others)
        if actual is None or expected is None or recorded.count("\n") < 2:
            continue
        assert expected <= actual, (number, bad)
