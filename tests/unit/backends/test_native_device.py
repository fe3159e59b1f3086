"""A step on the stand-in of TorchNeuron: dispatches, compilations, fallbacks, attention, rounding and memory."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed import device_mesh

from nxtrain.backends import open_backend
from nxtrain.backends.attention_choice import AttentionShape
from nxtrain.backends.c10d import AcceleratorBackend
from nxtrain.backends.neuron import hardware, native, native_diagnostics, native_rounding, torchneuron
from nxtrain.backends.neuron.native import NeuronNativeBackend
from nxtrain.backends.neuron.native_kernels import NeuronNativeKernels
from nxtrain.backends.neuron.native_profile import DEVICE_TRACE
from nxtrain.backends.neuron.native_rounding import choose_rounder, round_by_views, round_on_host
from nxtrain.backends.torch_kernels import PlainKernels
from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.common.kernels import RoundingKey
from nxtrain.common.mesh import Mesh
from nxtrain.config.check import Resolved
from nxtrain.train.build import build_model, build_state
from nxtrain.train.device_batch import DeviceBatch
from nxtrain.train.health.fallbacks import Fallbacks
from nxtrain.train.step import TrainState, train_step
from nxtrain.train.step_profiler import StepProfiler
from tests.support import fake_neuron
from tests.support.fake_neuron import StandInDevice
from tests.support.models import changed, plan, tokens
from tests.support.runs import run_plan, token_file, train_rank

BUDGET = 45
"""Dispatches of a step of two blocks, and 2 more for each further block: a forward and a backward graph."""

EAGER = 600
"""Fewer dispatches than the same step takes operation by operation."""


@pytest.fixture(scope="module")
def stand_in() -> Iterator[StandInDevice]:
    """The device of this process, with all that its installation replaces put back."""
    owners = [
        (torch, "neuron"),
        (torch, "compile"),
        (torch.Tensor, "cpu"),
        (torchneuron, "support"),
        (native, "DEVICE"),
    ]
    owners += [(device_mesh, "init_device_mesh"), (NeuronNativeBackend, "close")]
    kept = [(owner, name, vars(owner).get(name)) for owner, name in owners]  # None: inherited, or absent
    fake_neuron.install()
    yield fake_neuron.device
    fake_neuron.device.__exit__(None, None, None)
    native_rounding._compiled.cache_clear()
    torch._dynamo.reset()  # Dynamo keeps its graphs among the names of the module whose function it compiled
    for name in [name for name in vars(native_rounding) if name.startswith("__compiled_fn")]:
        delattr(native_rounding, name)
    for owner, name, value in kept:
        if value is None:
            delattr(owner, name)
        else:
            setattr(owner, name, value)


@pytest.fixture
def device(stand_in: StandInDevice) -> Iterator[StandInDevice]:
    """The device as a new process finds it."""
    stand_in.restart()
    yield stand_in
    stand_in.bitcasts, stand_in.compile_s, stand_in.compiles_only = True, 0.0, False
    stand_in.on_host.clear()


def state_of(resolved: Resolved) -> TrainState:
    backend, mesh = open_backend("neuron-native"), Mesh.build(1, 0)
    return build_state(resolved, build_model(resolved, backend, mesh, init="draw"), backend, mesh)


def step(state: TrainState, resolved: Resolved, lr: float) -> None:
    rows = tokens(resolved, 2)[None]
    train_step(state, DeviceBatch.of(rows[..., :-1], rows[..., 1:], state.backend.put), lr)


@pytest.mark.filterwarnings("ignore")  # Dynamo looks at what torch warns of
def test_a_compiled_step_keeps_its_budget_and_compiles_nothing_again(device: StandInDevice) -> None:
    torch._dynamo.reset()
    resolved = changed(plan("gqa2"), compile={"torch_compile": True})
    assert resolved.model.num_hidden_layers == 2
    state, counts = state_of(resolved), device.counts
    graphs = state.backend.diagnostics.num_compiled()
    step(state, resolved, 1e-3)
    compiled, per_step = counts.compilations, []
    # Forward and backward of a block, the last norm's, the loss, the gradient norm, two updates, the ring of bad steps.
    assert counts.graphs == 9
    assert state.backend.diagnostics.num_compiled() > graphs
    for number in (2, 3, 4):
        before = counts.dispatches
        step(state, resolved, 1e-3 * number)
        per_step.append(counts.dispatches - before)
    assert counts.compilations == compiled, "a learning rate or a step number is a constant of a graph"
    assert per_step == [per_step[0]] * 3
    assert per_step[0] <= BUDGET


@pytest.mark.filterwarnings("ignore")  # Dynamo looks at what torch warns of
def test_without_a_device_the_ranks_reach_every_graph_of_the_run_and_read_no_value(
    device: StandInDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = {"source": "tokens", "path": str(token_file(tmp_path / "rows.npy", 32)), "validation_fraction": 0.25}
    kinds: dict[str, Any] = {"train": {"eval_every": 2}, "checkpoint": {"every": 2}, "recovery": {"vote_every": 2}}
    resolved = run_plan(tmp_path / "run", rows, steps=4, compile={"torch_compile": True}, **kinds)
    reached = []
    for alone in (True, False):
        torch._dynamo.reset()
        device.compiles_only = alone
        with monkeypatch.context() as patch:
            patch.setenv(torchneuron.COMPILE_ONLY, str(int(alone)))
            if alone:
                patch.setattr(AcceleratorBackend, "fetch", None)  # there is nothing to read
            backend = open_backend("neuron-native")
            assert backend.extracts is alone
            train_rank(backend, resolved)
        assert (tmp_path / "run").exists() is not alone
        reached.append(set(device.digests))
        backend.close()
    compiled, used = reached
    assert used <= compiled
    assert len(compiled) >= 10


def test_step_by_step_the_same_work_takes_many_times_as_many_dispatches(device: StandInDevice) -> None:
    resolved = plan("gqa2")
    state = state_of(resolved)
    before = device.counts.dispatches
    step(state, resolved, 1e-3)
    assert device.counts.dispatches - before > EAGER > 10 * BUDGET
    assert not device.counts.names.keys() & {"gather", "scatter_add_"}, "the device has no 64-bit indices"


def test_first_compilations_delay_their_caller_and_later_ones_do_not(device: StandInDevice) -> None:
    backend = open_backend("neuron-native")
    x = backend.put(torch.ones(3))
    device.compile_s = 0.05
    durations = []
    for _ in range(2):
        began = time.monotonic()
        x * 2.0
        durations.append(time.monotonic() - began)
    assert durations[0] > 0.05 > durations[1]


def test_operations_on_the_host_are_refused_after_the_first_step_unless_allowed(device: StandInDevice) -> None:
    backend = open_backend("neuron-native")
    device.on_host.add("aten::cumsum")
    backend.put(torch.ones(3)).cumsum(0)  # before the step: no business of its
    refusing = Fallbacks(backend, allowed=False)
    refusing.enter(1, "training")
    refusing.enter(1, "log")
    refusing.enter(2, "training")
    refusing.finish(2)  # the first step alone counts
    refusing = Fallbacks(backend, allowed=False)
    refusing.enter(1, "training")
    backend.put(torch.ones(3)).cumsum(0)
    with pytest.raises(BackendError, match=r"1 operations of a training step on the host.*aten::cumsum. .*allow_fall"):
        refusing.enter(1, "log")
    said = io.StringIO()
    allowing = Fallbacks(backend, allowed=True, console=Console(file=said, width=400))
    allowing.enter(1, "training")
    backend.put(torch.ones(3)).cumsum(0)
    allowing.finish(1)
    assert "warning: neuron-native computes 1 operations" in said.getvalue()


SHAPE = AttentionShape(micro_batch=1, seq_len=4096, num_heads=8, head_size=128, params="bf16")


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        ({}, ""),
        ({"seq_len": 4352}, "train.seq_len=4352 is not a multiple of 512"),
        ({"head_size": 160}, "heads are 160 wide"),
        ({"micro_batch": 128}, "train.micro_batch=128 x 8 heads per rank = 1024"),
        ({"params": "fp32"}, "precision.params=fp32"),
    ],
)
def test_attention_is_the_kernel_where_its_conditions_hold(
    device: StandInDevice, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], obstacle: str
) -> None:
    monkeypatch.delenv("TORCH_NEURONX_ENABLE_NKI_SDPA", raising=False)
    backend, shape = open_backend("neuron-native"), replace(SHAPE, **change)  # type: ignore[arg-type]
    assert isinstance(backend, NeuronNativeBackend)
    backend.choose_attention("auto", shape)
    (note,) = backend.notes()
    assert backend.kernels.grouped is (not obstacle)
    assert note.startswith("blocked attention: " if obstacle else "flash attention: ")
    assert obstacle in note
    assert "linear in the sequence" in note or not obstacle
    wrong = "flash" if obstacle else "plain"
    with pytest.raises(ConfigError, match=r"backend\.attention: .*(flash cannot be had|own kernel)"):
        backend.choose_attention(wrong, shape)
    monkeypatch.setenv("TORCH_NEURONX_ENABLE_NKI_SDPA", "0")
    backend.choose_attention("plain", shape)
    assert not backend.kernels.grouped


def test_grouped_attention_copies_no_keys_and_computes_the_same(device: StandInDevice) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(8, 2, 4, 16), torch.randn(8, 2, 2, 16), torch.randn(8, 2, 2, 16)
    kernels = NeuronNativeKernels()
    kernels.grouped = True
    assert torch.allclose(kernels.attention(q, k, v), PlainKernels().attention(q, k, v), atol=1e-6)


def test_rounding_takes_the_first_way_whose_bits_are_right(device: StandInDevice) -> None:
    backend = open_backend("neuron-native")
    way, line = choose_rounder(backend.put)
    assert way is round_by_views
    assert line == "stochastic rounding by operations of the device, as its bits are those of the host"


def test_a_torchneuron_without_a_list_of_fallbacks_says_so(
    device: StandInDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend("neuron-native")
    assert backend.notes() == ()
    monkeypatch.delattr(torch.neuron, "get_fallback_ops")  # type: ignore[attr-defined]
    assert backend.notes() == (
        "this TorchNeuron has no get_fallback_ops, so operations that run on the host are not reported",
    )
    assert backend.diagnostics.fallbacks() == ()


def test_without_views_of_another_type_rounding_is_a_graph_and_bits_are_read_on_the_host(device: StandInDevice) -> None:
    torch._dynamo.reset()
    device.bitcasts = False
    backend = open_backend("neuron-native")
    assert isinstance(backend, NeuronNativeBackend)
    backend.choose_rounding("bf16_stochastic", "auto")
    (note,) = backend.notes()
    assert note.startswith("stochastic rounding in a compiled graph")
    assert "not by operations of the device: NotImplementedError: aten::view.dtype" in note
    x = torch.tensor([1.5, -0.0])
    for kernels in (backend.kernels, NeuronNativeKernels()):  # a run without rounding probes nothing
        assert torch.equal(kernels.bits(backend.put(x)).cpu(), x.view(torch.int32))


def test_products_that_saturate_send_rounding_to_the_host(
    device: StandInDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saturated(x: torch.Tensor, out: torch.Tensor, key: RoundingKey, step: torch.Tensor) -> None:
        round_by_views(x, out, key, step)
        out.view(torch.int16)[0, 0] ^= 1  # one bit of one entry

    names = [*native_rounding.IMPLEMENTATIONS]
    monkeypatch.setattr(
        native_rounding, "IMPLEMENTATIONS", {names[0]: saturated, names[1]: saturated, names[2]: round_on_host}
    )
    backend = open_backend("neuron-native")
    assert isinstance(backend, NeuronNativeBackend)
    backend.choose_rounding("bf16_stochastic", "software")
    assert backend.kernels.rounds_on_host
    assert "3 of 6336 entries differ" in backend.notes()[0]


def test_rounding_by_hardware_is_refused_where_casts_go_to_the_nearest(device: StandInDevice) -> None:
    backend = open_backend("neuron-native")
    with pytest.raises(BackendError, match=r"rounding=hardware has no effect, .*; use backend\.rounding=software"):
        backend.choose_rounding("bf16_stochastic", "hardware")


@pytest.fixture
def profiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    result = fake_neuron.modules()
    for name, module in result.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv(DEVICE_TRACE, raising=False)
    yield result["torch_neuronx.profiling"]
    fake_neuron.MADE.clear()


def profile_steps(folder: Path) -> list[str]:
    """Profile steps 3 and 4 of five; returns what the device and the profiler did, in order."""
    said: list[str] = []
    backend = open_backend("neuron-native")
    profiler = StepProfiler(3, 4, folder, 0, said.append, backend)
    for number in range(1, 6):
        profiler.enter(number, "training")
        backend.put(torch.ones(3)) + number
        profiler.finish(number)
    return said


# torch warns since the stand-in, unlike TorchNeuron, gives the device of this activity no name.
@pytest.mark.filterwarnings("ignore:The privateuseone is not a valid")
@pytest.mark.parametrize(("asked", "modes"), [("", ["RUNTIME"]), ("0", ["RUNTIME"]), ("1", ["RUNTIME", "DEVICE"])])
def test_profiled_steps_hold_the_runtimes_events_and_the_whole_work_of_the_device(
    device: StandInDevice,
    profiling: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    asked: str,
    modes: list[str],
) -> None:
    if asked:
        monkeypatch.setenv(DEVICE_TRACE, asked)
    order: list[str] = []
    asked_for: list[torch.profiler.ProfilerActivity] = []
    stop = torch.profiler.profile.stop

    def stopped(self: torch.profiler.profile) -> None:
        order.append("stop")
        asked_for.extend(self.activities)
        stop(self)

    monkeypatch.setattr(torch.profiler.profile, "stop", stopped)
    monkeypatch.setattr(torch.neuron, "synchronize", lambda: order.append("synchronize"))  # type: ignore[attr-defined]
    result, written = profile_steps(tmp_path)
    (config,) = fake_neuron.MADE
    assert (config.modes, config.profile_output_dir) == (modes, str(tmp_path / "profiles" / "neuron"))
    assert order == ["synchronize", "stop"], "the host runs ahead of the device"
    assert {activity.name for activity in asked_for} == {"CPU", "PrivateUse1"}
    assert result.startswith(f"events of the device: {config.profile_output_dir}")
    assert ("adds instructions" in result) is (modes == ["RUNTIME"])
    assert written == f"profile: {tmp_path / 'profiles' / 'rank-00000-steps-3-4.json.gz'}"


@pytest.mark.filterwarnings("ignore:The privateuseone is not a valid")
def test_a_torchneuron_without_the_documented_configuration_profiles_the_rest_and_says_so(
    device: StandInDevice, profiling: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def other(modes: Sequence[object]) -> None:
        """A configuration of another release."""

    monkeypatch.setattr(profiling, "NeuronConfig", other)
    result, written = profile_steps(tmp_path)
    assert result.startswith("this TorchNeuron's NeuronConfig is not the one that AWS documents: ")
    assert "profile_output_dir" in result
    monkeypatch.delattr(profiling, "NeuronConfig")
    again, _ = profile_steps(tmp_path)
    assert again == "this TorchNeuron has no NeuronConfig, so the profile has no files for Neuron Explorer"
    assert written.startswith("profile: ")


def test_an_unknown_instance_is_what_the_device_says_of_itself(
    device: StandInDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_backend("neuron-native")
    monkeypatch.setattr(native_diagnostics, "this_machine", lambda: None)
    properties = type("Properties", (), {"name": "trn2-core"})()
    monkeypatch.setattr(torch.neuron, "get_device_properties", lambda: properties, raising=False)  # type: ignore[attr-defined]
    assert backend.diagnostics.peak_flops() == hardware.INSTANCES["trn2.48xlarge"].device_flops
    monkeypatch.setattr(torch.neuron, "get_device_properties", lambda: None, raising=False)  # type: ignore[attr-defined]
    assert backend.diagnostics.peak_flops() is None


def test_a_process_group_after_the_first_operation_is_refused(device: StandInDevice) -> None:
    backend = open_backend("neuron-native")
    backend.put(torch.ones(3)) + 1.0
    with pytest.raises(RuntimeError, match="must come before the first use of the device"):
        dist.init_process_group("neuron", store=dist.HashStore(), rank=0, world_size=1)
    if dist.is_initialized():
        dist.destroy_process_group()
