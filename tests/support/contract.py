"""Contract of every operation: inputs stay as they are, and values and gradients are those of a formula.

An operation gets its operands in drawn forms of memory. Forward, backward and a second backward pass must leave all of
them, and the incoming gradient, as they were: values, neighbours in memory, version counters.
What a docstring lets an operation overwrite is named by its case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.cuda import CudaKernels
from nxtrain.backends.torch_kernels import FusedKernels
from nxtrain.common.kernels import Kernels

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Form:
    """Form of a tensor in memory."""

    name: str
    fits: Callable[[Shape], bool]
    base: Callable[[Shape], Shape]
    view: Callable[[Tensor, Shape], Tensor]


def _longer(shape: Shape, dim: int, by: int) -> Shape:
    dim %= len(shape)
    return (*shape[:dim], shape[dim] + by, *shape[dim + 1 :])


def _split(x: Tensor, shape: Shape) -> Tensor:
    part: Tensor = x.split((1, shape[-1], 2), dim=-1)[1]
    return part


def _any(shape: Shape) -> bool:
    return len(shape) > 0


WHOLE = Form("whole", lambda _: True, lambda s: s, lambda x, _: x)
ROWS = Form("rows", _any, lambda s: _longer(s, 0, 3), lambda x, s: x.narrow(0, 2, s[0]))
COLUMNS = Form("columns", _any, lambda s: _longer(s, -1, 3), lambda x, s: x.narrow(-1, 1, s[-1]))
SPLIT = Form("split", _any, lambda s: _longer(s, -1, 3), _split)
HEADS = Form(
    "split-heads",
    lambda s: len(s) > 2,
    lambda s: _longer(s, -2, 2),
    lambda x, s: x.split((1, s[-2], 1), dim=-2)[1],
)
STRIDED = Form("strided", _any, lambda s: (*s[:-1], 2 * s[-1]), lambda x, _: x[..., ::2])
TRANSPOSED = Form("transposed", lambda s: len(s) > 1, lambda s: (s[1], s[0], *s[2:]), lambda x, _: x.transpose(0, 1))
TURNED = Form("turned", lambda s: len(s) > 1, lambda s: (s[-1], *s[:-1]), lambda x, s: x.permute(*range(1, len(s)), 0))
EXPANDED = Form("expanded", _any, lambda s: (1, *s[1:]), lambda x, s: x.expand(s))
ONE = Form("one", _any, lambda s: (1,) * len(s), lambda x, s: x.expand(s))
VIEWED = Form("viewed", lambda _: True, lambda s: s, lambda x, s: x.view(s))

FORMS = (WHOLE, ROWS, COLUMNS, SPLIT, HEADS, STRIDED, TRANSPOSED, TURNED, EXPANDED, ONE, VIEWED)
OVERLAPPING = (EXPANDED, ONE)
"""Forms whose entries share memory."""

CONTIGUOUS = (WHOLE, ROWS, VIEWED)
"""Forms of memory without gaps."""


def draw_form(rng: Random, shape: Shape, among: tuple[Form, ...] = FORMS) -> Form:
    """A form that fits."""
    return rng.choice([form for form in among if form.fits(shape)])


@dataclass(frozen=True)
class Placed:
    """A tensor and what it is a view of."""

    x: Tensor
    base: Tensor
    form: Form

    def within(self, base: Tensor) -> Tensor:
        """View of other contents of the base, as the tensor shows them."""
        return self.form.view(base, tuple(self.x.shape))


def place(
    form: Form,
    shape: Shape,
    values: Callable[[Shape], Tensor],
    *,
    requires_grad: bool = False,
    device: torch.device | str = "cpu",
) -> Placed:
    """A tensor of a shape in a form."""
    base = values(form.base(shape)).to(device).requires_grad_(requires_grad)
    x = form.view(base, shape)
    assert x.shape == shape, (form.name, x.shape, shape)
    return Placed(x, base, form)


@dataclass(frozen=True)
class _Kept:
    placed: Placed
    values: Tensor
    version: int
    is_written: bool


class Watch:
    """Tensors that an operation must leave as they are: values, those around them in memory, and version counters."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def add(self, name: str, placed: Placed, *, is_written: bool = False) -> None:
        """Remember a tensor; of one that the operation may write, only what lies beside it."""
        values = placed.base.detach().cpu().clone()
        self._kept[name] = _Kept(placed, values, placed.x._version, is_written)

    def changes(self) -> Iterator[str]:
        """Changes since then, in words."""
        for name, kept in self._kept.items():
            placed, now = kept.placed, kept.placed.base.detach().cpu().clone()
            if kept.is_written:
                placed.within(now).copy_(placed.within(kept.values))
                if not same_bits(now, kept.values):
                    yield f"what lies beside {name} has other values"
            elif not same_bits(now, kept.values):
                inside = not same_bits(placed.within(now), placed.within(kept.values))
                yield f"{name} has other values" if inside else f"what lies beside {name} has other values"
            elif placed.x._version != kept.version:
                yield f"{name} was written: its version is {placed.x._version} and was {kept.version}"

    def check(self, after: str) -> None:
        """Fail if anything was changed."""
        result = list(self.changes())
        assert not result, f"after {after}: {'; '.join(result)}"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True for two tensors of a host that are equal bit for bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    one, other = (x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for x in (a, b))
    return one.equal(other)


BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2}
"""Largest distance from the formula in float64, as a part of the norm of what is wanted or of what it is made from."""


@dataclass(frozen=True)
class Operand:
    """A tensor that an operation is given."""

    shape: Shape
    values: Callable[[torch.Generator, Shape], Tensor] | None = None
    dtype: torch.dtype | None = None
    forms: tuple[Form, ...] = FORMS
    has_gradient: bool = True
    always: bool = False
    written: bool = False


@dataclass(frozen=True)
class Work:
    """A call of an operation whose result is a tensor."""

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
    """A call of an operation that changes some of its operands and returns nothing."""

    label: str
    operands: Mapping[str, Operand]
    call: Callable[..., None]
    check: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class Setting:
    """Draws beside the operation and its sizes."""

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
    actual = _gradients(out, sources, grad.x, leaves_only=work.leaves_only)
    watch.check("the backward pass")
    _check_owned(actual, given)
    if work.later is not None:
        with torch.no_grad():  # as in a backward pass
            late = {name: x for name, x in work.later().items() if name in chosen}
        watch.check("what was postponed")
        actual = {**actual, **late}
    actual = {name: x.clone() for name, x in actual.items()}
    wanted_grads = _gradients(wanted, {name: exact[name] for name in sources}, _exact(grad.x, False))
    for name in sources:
        compare(f"the gradient of {name}", actual[name], wanted_grads[name], dtype, grad.x)
    if work.later is None:
        _repeat(work, out, sources, grad.x, actual)
        watch.check("a second backward pass")


def _repeat(work: Work, out: Tensor, sources: Mapping[str, Tensor], grad: Tensor, result: Mapping[str, Tensor]) -> None:
    """A second backward pass finds what the first one kept as it was, or is refused."""
    if work.once:
        try:
            _gradients(out, sources, grad, leaves_only=work.leaves_only)
        except RuntimeError:
            return
        raise AssertionError("a second backward pass was not refused")
    for name, again in _gradients(out, sources, grad, leaves_only=work.leaves_only).items():
        same = same_bits(again.detach().cpu(), result[name].detach().cpu())
        assert same, f"a second backward pass gives {name} another gradient"


def _gradients(
    out: Tensor, sources: Mapping[str, Tensor], grad: Tensor, *, leaves_only: bool = False
) -> dict[str, Tensor]:
    result: Sequence[Tensor | None]
    if leaves_only:
        for x in sources.values():
            x.retain_grad()
            x.grad = None
        out.backward(grad, retain_graph=True)
        result = [x.grad for x in sources.values()]
    else:
        result = torch.autograd.grad(out, list(sources.values()), grad, retain_graph=True, allow_unused=True)
    return {
        name: torch.zeros_like(source) if x is None else x
        for (name, source), x in zip(sources.items(), result, strict=True)
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


def _check_owned(result: Mapping[str, Tensor], given: Mapping[str, Placed]) -> None:
    """Gradients share no memory with operands, since autograd adds to them in place."""
    for name, x in result.items():
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


def compare(what: str, actual: Tensor, wanted: Tensor, dtype: torch.dtype, source: Tensor | None = None) -> None:
    """Hold a tensor against its formula in float64; `source` is what it was made from, of which much may cancel."""
    assert actual.shape == wanted.shape, f"{what} has shape {tuple(actual.shape)}, not {tuple(wanted.shape)}"
    error = (actual.detach().cpu().double() - wanted.detach()).norm().item()
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


class WideKernels(CpuKernels):
    """Kernels of a CPU that multiplies matrices of no type as fast as copies in float32 or float64."""

    def widens(self, dtype: torch.dtype) -> bool:
        return True


def drawn_kernels(rng: Random) -> Kernels:
    """Kernels that multiply matrices as they are, or copies of a wider type, or that add products to a sum."""
    return rng.choice((FusedKernels(), WideKernels(), CudaKernels()))
