"""Contract of every operation: inputs stay as they are, and values and gradients are those of a formula.

An operation gets its operands in drawn forms of memory (`tests.support.forms`). Forward, backward and a second backward
pass must leave all of them, and the incoming gradient, as they were: values, neighbours in memory, version counters.
What a docstring lets an operation overwrite is named by its case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from tests.support.forms import FORMS, OVERLAPPING, Form, Placed, Shape, Watch, draw_form, place, same_bits

BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2}
"""Largest distance from the formula in float64, as a part of the norm of what is wanted or of what it is made from."""


@dataclass(frozen=True)
class Operand:
    """A tensor that an operation is given.

    Args:
        shape: Of the tensor.
        values: Makes those of its base from a generator and a shape; None: normal numbers.
        dtype: None: what is drawn for the whole call.
        forms: How it may lie in memory.
        has_gradient: Whether the operation is differentiable in it.
        always: Whether its gradient is asked for in every call.
        written: The operation may write it, as its docstring says.
    """

    shape: Shape
    values: Callable[[torch.Generator, Shape], Tensor] | None = None
    dtype: torch.dtype | None = None
    forms: tuple[Form, ...] = FORMS
    has_gradient: bool = True
    always: bool = False
    written: bool = False


@dataclass(frozen=True)
class Work:
    """A call of an operation whose result is a tensor.

    Args:
        label: The operation with its drawn sizes.
        operands: By name, in the order of the call.
        call: The operation.
        exact: The same by its formula, for operands in float64.
        later: Gradients that are computed after the backward pass, by operand.
        once: A second backward pass is refused, as the docstring says.
        in_float64: The operation computes in the type of its operands, float64 among them.
        leaves_only: Its gradients may be asked for by `backward()` alone, as torch-xla's recomputation has it.
    """

    label: str
    operands: Mapping[str, Operand]
    call: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    later: Callable[[], Mapping[str, Tensor]] | None = None
    once: bool = False
    in_float64: bool = False
    leaves_only: bool = False


@dataclass(frozen=True)
class Update:
    """A call of an operation that changes some of its operands and returns nothing.

    Args:
        label, operands: As of `Work`.
        call: The operation.
        check: Is given the values of all operands before and after.
    """

    label: str
    operands: Mapping[str, Operand]
    call: Callable[..., None]
    check: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class Setting:
    """Draws beside the operation and its sizes.

    Args:
        rng: Draws.
        dtype: Of the operands.
        device: Where they lie.
    """

    rng: Random
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    forms: dict[str, str] = field(default_factory=dict)

    def place(self, name: str, operand: Operand, requires_grad: bool = False) -> Placed:
        """Draw a form and values for an operand."""
        generator = torch.Generator().manual_seed(self.rng.getrandbits(32))
        dtype = operand.dtype or self.dtype

        def values(shape: Shape) -> Tensor:
            if operand.values is not None:
                made = operand.values(generator, shape)
                return made.to(dtype) if made.is_floating_point() else made
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        form = draw_form(self.rng, operand.shape, operand.forms)
        self.forms[name] = form.name + ("*" if requires_grad else "")
        return place(form, operand.shape, values, requires_grad=requires_grad, device=self.device)


def hold(case: Work | Update, setting: Setting) -> None:
    """Hold a call to the contract; an error names the case."""
    try:
        if isinstance(case, Work):
            _hold_work(case, setting)
        else:
            _hold_update(case, setting)
    except Exception as error:
        forms = ", ".join(f"{name} {form}" for name, form in setting.forms.items())
        raise AssertionError(f"{case.label}, {setting.dtype}: {forms} (* has a gradient): {error}") from error


def _hold_work(work: Work, setting: Setting) -> None:
    rng = setting.rng
    differentiable = {name: operand for name, operand in work.operands.items() if operand.has_gradient}
    chosen = {name for name, operand in differentiable.items() if rng.random() < 0.8 or operand.always}
    given = {name: setting.place(name, operand, name in chosen) for name, operand in work.operands.items()}
    exact = {name: _exact(placed.x, name in chosen) for name, placed in given.items()}
    watch = Watch()
    for name, placed in given.items():
        watch.add(name, placed)
    inputs = [
        # What an operation may write is the result of another one, as in a model, and no leaf.
        placed.x * 1 if work.operands[name].written else placed.x
        for name, placed in given.items()
    ]
    out, wanted = work.call(*inputs), work.exact(*exact.values())
    watch.check("the forward pass")
    dtype = setting.dtype
    compare("the result", out, wanted, dtype)
    if not chosen:
        return
    assert out.requires_grad, "the result has lost its gradient"
    _check_aliases(out, [given[name] for name in given if not work.operands[name].written])
    grad = setting.place("gradient", Operand(tuple(out.shape), dtype=out.dtype))
    watch.add("the incoming gradient", grad)
    sources = {name: x for (name, _), x in zip(given.items(), inputs, strict=True) if name in chosen}
    found = _gradients(out, sources, grad.x, leaves_only=work.leaves_only)
    watch.check("the backward pass")
    _check_owned(found, given)
    if work.later is not None:
        with torch.no_grad():  # as in a backward pass
            late = {name: x for name, x in work.later().items() if name in chosen}
        watch.check("what was postponed")
        found = {**found, **late}
    found = {name: x.clone() for name, x in found.items()}
    wanted_grads = _gradients(wanted, {name: exact[name] for name in sources}, _exact(grad.x, False))
    for name in sources:
        compare(f"the gradient of {name}", found[name], wanted_grads[name], dtype, grad.x)
    if work.later is None:
        _repeat(work, out, sources, grad.x, found)
        watch.check("a second backward pass")


def _repeat(work: Work, out: Tensor, sources: Mapping[str, Tensor], grad: Tensor, found: Mapping[str, Tensor]) -> None:
    """A second backward pass finds what the first one kept as it was, or is refused."""
    if work.once:
        try:
            _gradients(out, sources, grad, leaves_only=work.leaves_only)
        except RuntimeError:
            return
        raise AssertionError("a second backward pass was not refused")
    for name, again in _gradients(out, sources, grad, leaves_only=work.leaves_only).items():
        same = same_bits(again.detach().cpu(), found[name].detach().cpu())
        assert same, f"a second backward pass gives {name} another gradient"


def _gradients(
    out: Tensor, sources: Mapping[str, Tensor], grad: Tensor, *, leaves_only: bool = False
) -> dict[str, Tensor]:
    found: Sequence[Tensor | None]
    if leaves_only:
        for x in sources.values():
            x.retain_grad()
            x.grad = None
        out.backward(grad, retain_graph=True)
        found = [x.grad for x in sources.values()]
    else:
        found = torch.autograd.grad(out, list(sources.values()), grad, retain_graph=True, allow_unused=True)
    return {
        name: torch.zeros_like(source) if x is None else x
        for (name, source), x in zip(sources.items(), found, strict=True)
    }


def _exact(x: Tensor, requires_grad: bool) -> Tensor:
    """A copy of its own, in float64 unless it counts or marks something."""
    x = x.detach().cpu()
    return (x.double() if x.is_floating_point() else x.clone()).clone().requires_grad_(requires_grad)


def _check_aliases(out: Tensor, given: list[Placed]) -> None:
    """A result that shares memory with an operand must be known to autograd as a view."""
    if out.device.type != "cpu" or out._is_view():
        return
    place_ = out.untyped_storage().data_ptr()
    assert not out.numel() or all(placed.base.untyped_storage().data_ptr() != place_ for placed in given), (
        "the result is an operand, and autograd does not know"
    )


def _check_owned(found: Mapping[str, Tensor], given: Mapping[str, Placed]) -> None:
    """Gradients share no memory with operands, since autograd adds to them in place."""
    for name, x in found.items():
        for operand, placed in given.items():
            if x.device.type == "cpu" and x.numel():
                own = x.untyped_storage().data_ptr() != placed.base.untyped_storage().data_ptr()
                assert own, f"the gradient of {name} lies in the memory of {operand}"


def _hold_update(update: Update, setting: Setting) -> None:
    given = {name: setting.place(name, operand) for name, operand in update.operands.items()}
    before = {name: placed.x.detach().cpu().clone() for name, placed in given.items()}
    watch = Watch()
    for name, placed in given.items():
        watch.add(name, placed, is_written=update.operands[name].written)
    with torch.no_grad():
        update.call(*(placed.x for placed in given.values()))
    watch.check("the update")
    update.check(before, {name: placed.x.detach().cpu() for name, placed in given.items()})


def compare(what: str, found: Tensor, wanted: Tensor, dtype: torch.dtype, source: Tensor | None = None) -> None:
    """Hold a tensor against its formula in float64; `source` is what it was made from, of which much may cancel."""
    assert found.shape == wanted.shape, f"{what} has shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    error = (found.detach().cpu().double() - wanted.detach()).norm().item()
    scales = [x.detach().double().norm().item() for x in (wanted, source) if x is not None]
    bound = BOUNDS[dtype] * max(1.0, *scales)
    assert error <= bound, f"{what} is off by {error:.1e}, more than {bound:.1e}"


def check_gradient(work: Work, rng: Random) -> None:
    """Hold the gradient of an operation that computes in float64 against differences of its values."""
    assert work.in_float64
    setting = Setting(rng, torch.float64)
    operands = {
        name: Operand(o.shape, o.values, o.dtype, tuple(f for f in o.forms if f not in OVERLAPPING), o.has_gradient)
        for name, o in work.operands.items()
    }
    given = {name: setting.place(name, operand, operand.has_gradient) for name, operand in operands.items()}
    names = list(given)
    written = [work.operands[name].written for name in names]

    def call(*bases: Tensor) -> Tensor:
        views = [given[name].within(base) for name, base in zip(names, bases, strict=True)]
        return work.call(*(x * 1 if is_written else x for x, is_written in zip(views, written, strict=True)))

    try:
        torch.autograd.gradcheck(call, [placed.base for placed in given.values()])
    except Exception as error:
        raise AssertionError(f"{work.label}: {setting.forms}: {error}") from error
