"""The language of faults on purpose, and that a run without them knows nothing of them."""

from __future__ import annotations

import mmap
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from nxtrain.common.errors import ConfigError
from nxtrain.common.io.checksummed_file import ChecksummedWriter
from nxtrain.common.testing import fault_kinds, fault_points, faults
from nxtrain.common.testing.fault_points import EXAMPLE, GRADIENTS, LOSS, POINTS, Fault, PatchPoint, parse


def test_every_part_of_a_fault_is_read() -> None:
    assert parse("kill@1:5:reduce, oserror!@*:*:ckpt_write:EIO:4096,spike@0:20:reduce:3:30") == [
        Fault("kill", 1, 5, "reduce", text="kill@1:5:reduce"),
        Fault("oserror", None, None, "ckpt_write", ("EIO",), 4096, True, "oserror!@*:*:ckpt_write:EIO:4096"),
        Fault("spike", 0, 20, "reduce", ("3", "30"), text="spike@0:20:reduce:3:30"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill", "kind@rank:step:point"),
        ("", "kind@rank:step:point"),
        ("kill@0:1:fwd,", "kind@rank:step:point"),
        ("kill@-1:1:fwd", "kind@rank:step:point"),
        ("kill@0:1:fwd:", "kind@rank:step:point"),
        ("krill@0:1:fwd", "none of the kinds kill"),
        ("kill@0:1:forward", "none of the points pre_step"),
        ("kill@0:1:fwd:3", "takes no argument"),
        ("sleep@0:1:fwd", "the seconds to lose"),
        ("sleep@0:1:fwd:-1", "the seconds to lose"),
        ("sleep@0:1:fwd:soon", "the seconds to lose"),
        ("spike@0:1:reduce:10:30:1", "a factor and a number of steps"),
        ("spike@0:1:fwd", "spike is possible at reduce"),
        ("nan@0:1:log", "nan is possible at fwd, bwd, reduce"),
        ("oserror@0:1:fwd", "oserror is possible at ckpt_stage"),
        ("oserror@0:1:log:EWHAT", "the name of an error"),
        ("flip@0:1:reduce", "flip is possible at pre_step, post_step"),
    ],
)
def test_what_is_no_fault_is_refused_with_the_rule_and_an_example(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parse(text)
    assert EXAMPLE in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("kind", fault_kinds.KINDS)
def test_every_kind_can_be_written(kind: str) -> None:
    arguments = {"sleep": ":0.5"}.get(kind, "")
    of_workers = {"killworker": "worker", "stopworker": "worker"}
    point = {"flip": "pre_step", "oserror": "log", **of_workers}.get(kind, "reduce")
    assert parse(f"{kind}@0:1:{point}{arguments}")[0].kind == kind


def test_the_example_is_a_fault() -> None:
    for example in EXAMPLE.split(" or "):
        assert parse(example)
    lines = [line.split()[0] for line in str(fault_points.__doc__).split("Examples:")[1].strip().splitlines()]
    assert [fault.text for line in lines for fault in parse(line)] == lines


@pytest.mark.parametrize("target", [*POINTS.values(), *GRADIENTS, LOSS])
def test_every_point_is_a_function_of_the_run(target: PatchPoint) -> None:
    assert callable(vars(faults.owner_of(target))[target.attribute])


def test_a_run_that_is_told_nothing_does_not_even_load_this() -> None:
    code = (
        "import sys, nxtrain.train.command, nxtrain.train.trainer as t, nxtrain.train.step as s\n"
        "assert not [m for m in sys.modules if 'fault' in m and m.startswith('nxtrain')], sys.modules\n"
        "assert t.train_step is s.train_step and t.train_step.__code__.co_name == 'train_step'"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_flip_turns_over_one_bit_of_the_parameter_that_is_named(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).to(dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fault_kinds.act("flip", ("1.weight",), [_State(model)])
    changed = {}
    for name, parameter in model.named_parameters():
        integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        bits = parameter.detach().view(integers) ^ before[name].view(integers)
        if bits.any():
            changed[name] = bits.flatten().tolist()
    assert changed == {"1.weight": [1, 0, 0, 0]}
    with pytest.raises(fault_kinds.InjectedError, match="no entry of a parameter 'absent'"):
        fault_kinds.flip(model, "absent")


class _State:
    def __init__(self, model: nn.Module) -> None:
        self.model = model


@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_one_entry_of_a_copy_is_spoiled(kind: str) -> None:
    x = torch.ones(2, 3)
    result = fault_kinds.altered(x, first=float(kind))
    assert str(result.flatten()[0].item()) == kind
    assert result.isfinite().sum() == x.numel() - 1
    assert x.isfinite().all()


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_a_fault_no_bit_is_altered(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = -torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype) * 0
    y = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    for item in (x, y):
        assert fault_kinds.altered(item).view(integers).equal(item.view(integers))
    assert fault_kinds.altered(y, 10.0).equal(y * 10.0)


def test_what_comes_before_a_fault_is_on_the_disk(tmp_path: Path) -> None:
    """A block of two pages of which 5000 bytes are to be written, before the error of a full disk."""
    _armed = faults._Armed([*parse("oserror@0:*:ckpt_write:ENOSPC:5000")], tmp_path / "marks", 0)
    content = bytes(range(256)) * 64
    with mmap.mmap(-1, len(content)) as block, ChecksummedWriter(tmp_path / "file") as writer:
        block[:] = content
        with pytest.raises(OSError, match="No space left"):
            _armed._reach_in_block("ckpt_write", 1, (writer, block, 0, len(content)))
    assert (tmp_path / "file").read_bytes() == content[:8192]


TESTS = Path(__file__).parents[1]
TABLE = (TESTS / "faults" / "README.md").read_text(encoding="utf-8")


def named() -> list[tuple[str, str]]:
    """File and function of every test that the table names; a name without a file belongs to the file before it."""
    result, file = list[tuple[str, str]](), ""
    for path, test in re.findall(r"`([\w/.]*)::(\w+)`", TABLE):
        file = path or file
        result.append((file, test))
    return result


def test_every_test_that_is_named_exists() -> None:
    for file, test in named():
        assert re.search(rf"^def {test}\(", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE), (file, test)


def test_there_are_all_kinds_of_faults_each_with_a_test() -> None:
    rows = re.findall(r"^\| (F\d\d) .*::test_", TABLE, re.MULTILINE)
    assert rows == [f"F{number:02}" for number in range(1, 33)]


def test_no_module_of_the_lane_is_left_out() -> None:
    for module in (TESTS / "faults").glob("test_*.py"):
        assert f"faults/{module.name}" in TABLE, f"{module.name} is not in the table"
