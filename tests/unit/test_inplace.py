"""Every operation in place acts on what the function owns: the text proves it, or the table of owners says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.inplace import unproven
from tests.support.inplace_owners import KINDS, OWNERS

ROOT = Path(__file__).parents[2]
LIBRARY = sorted(path for folder in ("nxtrain", "models") for path in (ROOT / folder).rglob("*.py"))


def test_every_operation_in_place_has_an_owner() -> None:
    unknown = []
    for path in LIBRARY:
        name = str(path.relative_to(ROOT))
        for found in unproven(path.read_text(encoding="utf-8")):
            key = f"{found.function}: {found.operation}"
            if key not in OWNERS.get(name, {}):
                unknown.append(f"{name}:{found.line} {key}")
    advice = (
        "\nThe text does not prove that these operands are the function's own. Work out of place, or on what the "
        "function allocates itself (`.float()`, `.to()`, `.flatten()`, `.reshape()` and `.contiguous()` may return "
        'their input); else say who owns it in tests/support/inplace_owners.py: "function: operation": "kind: reason", '
        f"with a kind of {', '.join(KINDS)}"
    )
    assert not unknown, "\n".join(unknown) + advice


def test_the_table_of_owners_holds_nothing_else() -> None:
    found = {
        str(path.relative_to(ROOT)): {
            f"{f.function}: {f.operation}" for f in unproven(path.read_text(encoding="utf-8"))
        }
        for path in LIBRARY
    }
    assert [f"{name} {key}" for name, keys in OWNERS.items() for key in keys if key not in found.get(name, set())] == []
    assert [why for keys in OWNERS.values() for why in keys.values() if why.partition(": ")[0] not in KINDS] == []


def operations(*lines: str) -> list[str]:
    """Operations not proven of a function `f(x, other, key)` in a module that imports torch."""
    body = "\n    ".join(lines)
    return [f.operation for f in unproven(f"import torch\n\ndef f(x, other, key):\n    {body}\n")]


@pytest.mark.parametrize(
    "lines",
    [
        ["y = torch.zeros(3)", "y.add_(x)"],
        ["y = x * 2", "y.view(-1)[0] = 1"],
        ["y = x.clone().float().flatten(0, 1)", "y += x"],
        ["torch.bmm(x, x).sub_(x).mul_(x)"],
        ["y = x.to(torch.int32, copy=True)", "y.mul_(2)"],
        ["a, b = (torch.zeros(n) for n in key)", "a[:, 0].add_(x)", "b.add_(x)"],
        ["y = None", "y = x @ x if y is None else y.float().add_(x)"],
        ["torch.add(x, x, out=torch.empty(3))"],
        ["number = 0", "number += 1"],
        ["names = []", "names += [key]", "found: dict[str, int] = {}", "found[key] = 1", "found[key] += 1"],
        ["y = x.float() + 1"],
        ["x.__setitem__"],
    ],
)
def test_what_a_function_allocates_is_its_own(lines: list[str]) -> None:
    assert operations(*lines) == []


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["x.mul_(2)"], ["x.mul_"]),
        (["x.float().mul_(2)"], ["x.float().mul_"]),
        (["y = x.float()", "y.mul_(2)"], ["y.mul_"]),
        (["y = x.to(torch.int32)", "y += 1"], ["y +="]),
        (["y = x.flatten(0, 1).contiguous().reshape(-1)", "y[0] = 1"], ["y[0] ="]),
        (["y = torch.zeros(3)", "y = x", "y.mul_(2)"], ["y.mul_"]),
        (["y = torch.zeros(3) if key else x", "y.mul_(2)"], ["y.mul_"]),
        (["y = x * 2", "key.save_for_backward(y)", "y.mul_(2)"], ["y.mul_"]),
        (["y = x * 2", "key.kept = y.view(-1)", "y.mul_(2)"], ["y.mul_"]),
        (["for y in key:", "    y.zero_()"], ["y.zero_"]),
        (["with key as y:", "    y.zero_()"], ["y.zero_"]),
        (["torch.add(x, x, out=x)"], ["torch.add(out=x)"]),
        (["torch.nn.init.normal_(x)"], ["torch.nn.init.normal_(x)"]),
        (["torch._foreach_mul_(key, 2)"], ["torch._foreach_mul_(key)"]),
        (["mix_(x)"], ["mix_(x)"]),
        (["x.data = other"], ["x.data"]),
        (["x.data.mul_(2)"], ["x.data.mul_", "x.data"]),
        (["x @= other"], ["x @="]),
        (["x **= 2"], ["x **="]),
        (["x[key] = other"], ["x[key] ="]),
        (["x[key], y = other"], ["x[key] ="]),
        (["found: dict[str, torch.Tensor] = {}", "found[key] += other"], ["found[key] +="]),
        (["key.comm.all_reduce(x.contiguous())"], ["key.comm.all_reduce(x.contiguous())"]),
        (["torch.distributed.broadcast(x, 0)"], ["torch.distributed.broadcast(x)"]),
        (["y = +x", "y.mul_(2)"], ["y.mul_"]),
        (["def inner():", "    x.mul_(2)"], ["x.mul_"]),
        (["y = lambda: x.mul_(2)"], ["x.mul_"]),
    ],
)
def test_what_a_function_was_given_is_not(lines: list[str], expected: list[str]) -> None:
    assert operations(*lines) == expected
