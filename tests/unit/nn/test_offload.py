"""Activations in host memory: the tensors that autograd saves of blocks, and no others, each once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nxtrain.backends.cpu import CpuBackend
from nxtrain.common.mesh import Mesh
from nxtrain.nn import offload
from nxtrain.parallel.weight_grads import WeightGradients, compute
from nxtrain.plan.activations import block_bytes
from nxtrain.train.build import build_model
from tests.support.models import plan, tokens
from tests.unit.plan.test_memory import SIZED, job_of, settings


class Host:
    """Host memory apart from the device's, which on a CPU are the same."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies: list[Tensor] = []
        monkeypatch.setattr(offload, "to_host", self._copy)

    def _copy(self, x: Tensor) -> Tensor:
        self.copies.append(x.detach().clone())
        return self.copies[-1]


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_host_gets_what_autograd_saves_of_the_blocks(
    monkeypatch: pytest.MonkeyPatch, remat: str, family: str
) -> None:
    """Against torch's own hooks around the blocks, and against the plan, which counts views with what they show."""
    change: dict[str, dict[str, Any]] = {"model": {"family": family, "config": SIZED}}
    plain = plan("mha", **settings(remat, change))
    backend, mesh, host = CpuBackend(), Mesh(1, 0), Host(monkeypatch)
    rows = tokens(plain, 4)
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    offloading = plan("mha", **settings(remat, {**change, "parallel": {"offload": ("activations",)}}))
    model: Any = build_model(offloading, backend, mesh, init="draw")
    loss = model.loss(inputs, targets)
    actual = sum(x.numel() * x.element_size() for x in host.copies)
    loss.backward()

    reference: Any = build_model(plain, backend, mesh, init="draw")
    saved = Saved()
    for block in reference.blocks:
        saved.of(block, reference)
    wanted = reference.loss(inputs, targets)
    assert actual == saved.num_bytes()
    assert actual == pytest.approx(6 * block_bytes(job_of(plain, mesh)), rel=0.1)
    wanted.backward()
    assert torch.equal(loss, wanted)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("fp8", ["none", "rowwise"])
@pytest.mark.parametrize("remat", ["none", "selective"])
def test_weights_with_postponed_gradients_stay(monkeypatch: pytest.MonkeyPatch, remat: str, fp8: str) -> None:
    """Layers of the zero-bubble schedule save their weights detached from the parameters."""
    change: dict[str, dict[str, Any]] = {"parallel": {"offload": ("activations",)}}
    tables = settings(remat, change)
    tables["precision"]["fp8"] = fp8
    resolved, host = plan("mha", **tables), Host(monkeypatch)
    model: Any = build_model(resolved, CpuBackend(), Mesh(1, 0), init="draw")
    split = WeightGradients(model)
    rows = tokens(resolved, 4)
    loss = model.loss(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    matrices = {tuple(p.shape) for p in model.parameters() if p.dim() > 1}
    assert [copy.shape for copy in host.copies if tuple(copy.shape) in matrices] == []
    loss.backward()
    compute(split.take())
    assert all(p.grad is not None for p in model.parameters())


class Saved:
    """Tensors that autograd saves of some modules, all kept alive, by the entries that they show."""

    def __init__(self) -> None:
        self.by_place: dict[tuple[int, range], Tensor] = {}

    def of(self, module: nn.Module, model: nn.Module) -> None:
        """Watch a module, but for the parameters and buffers of its model."""
        forward = module.forward
        own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage().data_ptr()
            if storage not in own:
                first = x.storage_offset()
                last = first + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
                self.by_place.setdefault((storage, range(first, last + 1)), x)
            return x

        def run(*inputs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                return forward(*inputs)

        module.forward = run

    def num_bytes(self) -> int:
        """Bytes of the tensors, those of the same entries counted once."""
        return sum(x.numel() * x.element_size() for x in self.by_place.values())


class Block(nn.Module):
    """A block that saves a parameter as a view, a buffer, a table that it makes, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.table: Tensor
        self.register_buffer("table", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.t()
        return y * self.table * torch.sigmoid(y) + y.square()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    @property
    def blocks(self) -> list[Block]:
        return [self.block]


def test_parameters_and_tables_stay_and_a_tensor_saved_twice_goes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, host = Model(), Host(monkeypatch)
    (block,) = model.blocks
    x = torch.randn(3, 4, requires_grad=True)
    block(x).sum().backward()
    want = [grad.clone() for grad in (x.grad, block.weight.grad) if grad is not None]
    model.zero_grad()
    offload.offload_activations(model)
    x = x.detach().requires_grad_()
    out = block(x)
    assert len(host.copies) == len({id(item) for item in host.copies}) == 4
    kept = [x, x @ block.weight.t()]
    assert all(any(torch.equal(copy, kept_part) for copy in host.copies) for kept_part in kept)
    assert not any(copy.shape in (block.weight.shape, block.table.shape) for copy in host.copies)
    out.sum().backward()
    actual = [grad for grad in (x.grad, block.weight.grad) if grad is not None]
    assert len(actual) == 2 and all(torch.equal(a, b) for a, b in zip(actual, want, strict=True))


def test_backward_reads_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model, host = Model(), Host(monkeypatch)
    offload.offload_activations(model)
    x = torch.randn(3, 4, requires_grad=True)
    out = model.blocks[0](x)
    for copy in host.copies:
        copy.zero_()
    out.sum().backward()
    assert model.blocks[0].weight.grad is not None and not model.blocks[0].weight.grad.any()


def test_inputs_that_all_blocks_share_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels know host copies of first positions by the tensor itself, which a recomputation gets again."""
    host = Host(monkeypatch)
    seen: list[Tensor] = []

    def recomputed(x: Tensor, starts: Tensor) -> Tensor:
        seen.append(starts)
        return (x * starts).sin()

    model = Blocks(lambda x, starts: checkpoint(recomputed, x, starts, use_reentrant=False), 2)
    offload.offload_activations(model)
    starts, x = torch.arange(4), torch.randn(3, 4, requires_grad=True)
    for block in model.blocks:
        x = block(x, starts)
    x.sum().backward()
    assert len(seen) == 2 * len(model.blocks)
    assert all(one is starts for one in seen)
    assert all(copy.dtype == torch.float32 for copy in host.copies) and host.copies


class Device:
    """Streams of a device with memory of its own, which record their waits; the meta device has the tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.sent: list[tuple[torch.Size, tuple[int, ...]]] = []
        streams = iter(("out", "back"))
        monkeypatch.setattr(torch, "Stream", lambda device: Stream(next(streams), self.log))
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda: Stream("compute", self.log))
        monkeypatch.setattr(offload, "to_host", self._send)

    def _send(self, x: Tensor) -> Tensor:
        self.log.append("sent")
        self.sent.append((x.shape, x.stride()))
        return torch.empty_like(x, device="cpu")


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    wait_event = wait_stream

    def record_event(self) -> Stream:
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class Blocks(nn.Module):
    def __init__(self, forward: Callable[..., Tensor], number: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Identity() for _ in range(number))
        for block in self.blocks:
            block.forward = forward


def test_copies_run_beside_the_next_block_forward_and_the_one_before_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    device, model = Device(monkeypatch), Blocks(torch.sin, 3)
    offload.offload_activations(model)
    for _ in range(2):  # a second step needs no other waits than the first
        device.log.clear()
        x = torch.ones(2, 3, device="meta", requires_grad=True)
        for block in model.blocks:
            x = block(x)
        out = ["out waits for compute", "sent"]
        assert device.log == [*out, *out, "compute waits for out", *out, "compute waits for out"]
        device.log.clear()
        x.sum().backward()
        back = ["back waits for compute", "compute waits for back"]
        assert device.log == back * 2


def test_a_block_frees_its_tensors_on_the_device_once_the_next_block_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)
    kept: list[weakref.ref[Any]] = []

    def forward(x: Tensor) -> Tensor:
        big = x * 2
        kept.append(weakref.ref(big.untyped_storage()))
        return big.sin().sum(dim=0, keepdim=True) + x

    model = Blocks(forward, 3)
    offload.offload_activations(model)
    x = torch.ones(2, 3, device="meta", requires_grad=True)
    alive = []
    for block in model.blocks:
        x = block(x)
        alive.append([storage() is not None for storage in kept])
    assert alive == [[True], [False, True], [False, False, True]]


def test_a_slice_goes_as_a_tensor_that_one_copy_can_move(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    model = Blocks(lambda x: x[:, 1:3].sin() + x.transpose(0, 1)[1:3].cos().transpose(0, 1), 1)
    offload.offload_activations(model)
    model.blocks[0](torch.ones(2, 4, device="meta", requires_grad=True))
    assert device.sent == [((2, 2), (2, 1)), ((2, 2), (1, 2))]


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(24.0).view(4, 6)[:, 1:3],
        torch.arange(24.0).view(4, 6).t()[::2],
        torch.arange(24.0).view(2, 3, 4)[:, :1].expand(-1, 5, -1),
        torch.arange(6.0).expand(0, 6),
        torch.arange(24.0).unfold(0, 4, 2),
        torch.tensor(3.0),
    ],
    ids=["slice", "transposed", "expanded", "empty", "windows", "scalar"],
)
def test_a_dense_copy_gets_the_strides_and_keeps_the_entries(view: Tensor) -> None:
    dense = view.clone(memory_format=torch.contiguous_format)
    restored = offload.with_strides(dense, view.stride())
    assert torch.equal(restored, view) and restored.stride() == view.stride()
