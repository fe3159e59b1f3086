"""The announced attention is the one that runs: on every backend, with documents and without.

Each backend chooses for drawn shapes. Its kernels then compute a small attention, whose calls of torch and of a flash
kernel are recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typer.testing import CliRunner

from nxtrain.backends import cpu_kernels, flex_attention, sdpa_kernels, torch_attention, torch_kernels
from nxtrain.backends.attention_choice import AttentionShape, choose_torch
from nxtrain.backends.base import Backend
from nxtrain.backends.cpu import CpuBackend
from nxtrain.backends.cpu_kernels import CpuKernels
from nxtrain.backends.cuda import CudaBackend, CudaKernels
from nxtrain.backends.limits import block_rows
from nxtrain.backends.neuron import backend as neuron
from nxtrain.backends.neuron import sdk
from nxtrain.backends.neuron.backend import NeuronBackend
from nxtrain.backends.neuron.hardware import INSTANCES
from nxtrain.backends.neuron.native import NeuronNativeBackend
from nxtrain.backends.neuron.native_kernels import NeuronNativeKernels
from nxtrain.backends.neuron.sdk import Package, SdkVersion
from nxtrain.backends.ranged_attention import Blocks
from nxtrain.backends.xla.backend import XlaBackend, XlaKernels
from nxtrain.cli.main import app
from nxtrain.common.errors import BackendError, ConfigError
from nxtrain.common.kernels import Kernels
from nxtrain.common.mesh import Mesh
from nxtrain.common.sequence_cut import SequenceCut
from nxtrain.config.check import resolve_config
from nxtrain.config.load import load
from nxtrain.launch import neuron as launch_neuron
from nxtrain.nn.attention import CausalAttention
from nxtrain.parallel.context_parallel import ContextParallel
from nxtrain.plan.command import Question, predict
from nxtrain.plan.predict import Assumptions
from nxtrain.tools.doctor import examine
from nxtrain.tools.trace.choice import choose
from tests.support import TINY, sick_machine
from tests.support.contract_functions import Echo
from tests.unit.backends.test_neuron_attention import MODULE, fake_nki_flash_attn_func

BACKENDS = ("cpu", "cpu compiled", "cuda", "xla", "neuron", "neuron-native")
NXD = Package("neuronx-distributed", "0.17.26814")
DRAWS = 48
PINS = ExitStack()
"""Kernels that GPUs of a test pin, until the test ends."""
SHORT = 6
"""Tokens of the small attention of a short sequence; a long one has twice as many."""


class Recorder(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.kinds: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            is_masked, is_grouped = kwargs.get("attn_mask") is not None, kwargs.get("enable_gqa", False)
            self.kinds.add("masked" if is_masked else "grouped" if is_grouped else "plain")
        return func(*args, **kwargs)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Recorder of the calls of this test, also of NxD's flash kernel, of blocks and of calls for each document."""
    recorder = Recorder()
    by_blocks = Blocks.attend

    def flash(*args: Any, **kwargs: Any) -> Tensor:
        recorder.kinds.add("flash")
        return fake_nki_flash_attn_func(*args, **kwargs)

    def by_document(*args: Any) -> Tensor:
        recorder.kinds.add("per-document")
        return torch_attention.attention_by_document(*args)

    def flex(q: Tensor, *_: Tensor) -> Tensor:
        recorder.kinds.add("flex")
        return q

    def blocked(*args: Any) -> tuple[Tensor, Tensor]:
        recorder.kinds.add("blocked")
        return by_blocks(*args)

    monkeypatch.setattr(Blocks, "attend", blocked)
    monkeypatch.setattr(torch_kernels, "LONGEST_SCORES", SHORT)
    monkeypatch.setattr(flex_attention, "compiled", lambda: flex)
    for trials in (flex_attention, sdpa_kernels):
        monkeypatch.setattr(trials, "failure", lambda *_: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    module = ModuleType(MODULE)
    module.nki_flash_attn_func = flash  # type: ignore[attr-defined]
    for name in ("neuronx_distributed", "neuronx_distributed.kernels"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(cpu_kernels, "attention_by_document", by_document)
    monkeypatch.setattr(XlaKernels, "__init__", lambda _: None)
    monkeypatch.setattr(XlaBackend, "__init__", lambda *_, **__: None)
    for place in (neuron, launch_neuron):
        monkeypatch.setattr(place, "this_machine", lambda: INSTANCES["trn2.48xlarge"])
    for place in (sdk, launch_neuron):
        monkeypatch.setattr(place, "detect", lambda: SdkVersion(2, 28))
        monkeypatch.setattr(place, "installed", lambda _: NXD)
    monkeypatch.delenv("TORCH_NEURONX_ENABLE_NKI_SDPA", raising=False)
    with recorder, PINS:
        yield recorder


def opened(name: str) -> Backend:
    """A backend with the kernels of its device, which claims none."""
    if name == "neuron":
        return NeuronBackend()
    kernels = {
        "cpu": CpuKernels,
        "cpu compiled": CpuKernels,
        "cuda": CudaKernels,
        "xla": XlaKernels,
        "neuron-native": NeuronNativeKernels,
    }
    kinds: dict[str, type[Any]] = {"cuda": CudaBackend, "xla": XlaBackend, "neuron-native": NeuronNativeBackend}
    backend: Backend = object.__new__(kinds.get(name, CpuBackend))
    backend.name, backend.kernels = name.split(maxsplit=1)[0], kernels[name]()
    backend.device = torch.device("cpu")
    if isinstance(backend, NeuronNativeBackend):
        backend._rounding = ""
    if isinstance(backend, CpuBackend):
        backend._transport_note = ""
    if isinstance(backend, CudaBackend):
        backend._pins = PINS
    return backend


def shape_of(rng: Random, *, documents: bool, compiled: bool) -> AttentionShape:
    return AttentionShape(
        micro_batch=rng.choice([1, 2, 200]),
        seq_len=rng.choice([2048, 4096, 512, 100]),
        num_heads=rng.choice([2, 4, 8]),
        head_size=rng.choice([64, 128, 160, 8]),
        params=rng.choice(["bf16", "bf16", "fp32"]),
        documents=documents,
        compiled=compiled,
        cp=rng.choice([1, 1, 2]),
        cp_method=rng.choice(["auto", "gather"]),
    )


def attend(kernels: Kernels, shape: AttentionShape) -> None:
    """A small attention of a long or a short sequence, with documents and context parallel ranks as in a shape."""
    length = 2 * SHORT if shape.is_long else SHORT
    q, kv = torch.randn(length, 2, 4, 8), torch.randn(length, 2, 2, 8)
    starts = torch.tensor([[0, 0, 2, 2, 2, 5, 5, 5, 5, 5, 5, 5], [0, 0, 0, 0, 4, 4, 4, 4, 4, 4, 4, 4]])[:, :length]
    given = starts if shape.documents else None
    if shape.cp == 1:
        CausalAttention(kernels)(q, kv, kv, given)
        return
    cut = SequenceCut(length, 2, "striped")
    context = ContextParallel(Mesh.build(2, 0, cp=2).cp, cut, "gather", Echo(), kernels)
    own = context.positions
    given = None if given is None else given[:, own]
    CausalAttention(kernels, context)(q[own], kv[own], kv[own], given, own)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_announced_attention_is_the_one_that_runs(
    name: str, documents: bool, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: name == "cpu compiled")
    rng, announced = Random(documents), set()
    for _ in range(DRAWS):
        shape = shape_of(rng, documents=documents, compiled=name == "cpu compiled")
        wanted = rng.choice(["auto", "auto", "plain"])
        backend = opened(name)
        try:
            backend.choose_attention(wanted, shape)
        except ConfigError:  # TorchNeuron has no plain attention for shapes that fit its kernel
            assert (name, wanted, documents, shape.cp) == ("neuron-native", "plain", False, 1)
            continue
        recorder.kinds.clear()
        attend(backend.kernels, shape)
        found = backend.attention
        announced.add(found.kind if found else "")
        lines = [note for note in backend.notes() if "attention: " in note]
        assert lines == ([str(found)] if found else [])
        if found is None:
            assert recorder.kinds <= {"plain", "grouped"}
            continue
        ran = {"grouped": "flash"} if name == "neuron-native" else {}
        if name == "cuda" and found.kind in ("flash", "efficient"):
            # The recorder's tensors are float32 on a CPU, so that heads are repeated.
            ran = {"plain": found.kind}
        kinds = {ran.get(kind, kind) for kind in recorder.kinds}
        assert found.kind in kinds if found.kind == "per-document" else kinds == {found.kind}
        assert ("seq_len^2" in str(found)) == (found.kind == "plain")
        assert ("linear in the sequence" in str(found)) == (found.kind == "blocked")
        if shape.cp > 1 and wanted == "auto":
            assert "parallel.cp=2" in str(found)
    expected = {"flash", "plain"} if name.startswith("neuron") else {""}
    if name == "cuda":
        expected = {"flash", "efficient", "plain"}
    if documents:
        expected = {"cpu": {"per-document"}, "cuda": {"flex"}}.get(name, set())
    assert announced == {"blocked", *expected}


def test_the_scores_of_a_block_are_those_of_the_blocks_that_run(recorder: Recorder) -> None:
    """Sizes in the announced line are those of the spans of queries and keys."""
    shape = AttentionShape(2, 4096, 8, 64, "fp32", documents=True)
    cost = shape.blocks_cost("xla")
    assert (rows := block_rows(16, 4096)) == 256
    assert f"Each of 16 blocks of {rows} queries" in cost
    assert f"at most {2 * 8 * rows * 4096 * 4 / 2**20:.3g} MiB" in cost
    assert "up to its own" in cost
    shared = replace(shape, cp=4)
    assert "Each of 4 blocks of 256 queries meets all 4,096 keys of a row" in shared.blocks_cost("xla")
    assert (
        "Each of 2 blocks of 512 queries meets the keys up to its own of one rank after the other"
        in shared.blocks_cost("cuda")
    )
    assert "the keys that its queries see" in shared.blocks_cost("cpu")


def test_a_window_is_no_work_of_flash_kernels(recorder: Recorder) -> None:
    shape = AttentionShape(1, 4096, 4, 128, "bf16", window=1024)
    for name in BACKENDS:
        backend = opened(name)
        backend.choose_attention("auto", replace(shape, compiled=name == "cpu compiled"))
        assert backend.attention is not None
        assert backend.attention.kind == ("flex" if name == "cuda" else "blocked")
        assert "a query sees 1,024 keys" in backend.attention.reason
        backend.choose_attention("auto", replace(shape, window=4096, seq_len=2048, compiled=name == "cpu compiled"))
        assert backend.attention is None or backend.attention.is_flash or name == "neuron-native"


@pytest.mark.parametrize("name", BACKENDS)
def test_layers_without_a_window_take_the_attention_of_a_model_without_windows(name: str, recorder: Recorder) -> None:
    """The announced sentence names both kinds, and both run."""
    is_compiled = name == "cpu compiled"
    mixed = AttentionShape(1, 4096, 4, 128, "bf16", window=1024, full_layers=3, compiled=is_compiled)
    full, backend = opened(name), opened(name)
    full.choose_attention("auto", replace(mixed, window=None))
    backend.choose_attention("auto", mixed)
    assert backend.attention is not None
    assert backend.attention.kind == ("flex" if name == "cuda" else "blocked")
    kind = "torch's causal" if full.attention is None else full.attention.kind
    assert f"The first 3 layers have no window: {kind} attention" in backend.attention.reason
    assert backend.attention.is_flash == (full.attention is not None and full.attention.is_flash)
    if full.attention is not None:
        assert backend.attention.lnc == full.attention.lnc
    q, kv = torch.randn(SHORT, 2, 4, 8), torch.randn(SHORT, 2, 2, 8)
    ran = []
    for kernels in (full.kernels, backend.kernels):
        recorder.kinds.clear()
        CausalAttention(kernels)(q, kv, kv)
        ran.append(set(recorder.kinds))
    assert ran[0] == ran[1]
    recorder.kinds.clear()
    CausalAttention(backend.kernels, window=3)(q, kv, kv)
    assert recorder.kinds == {backend.attention.kind}


def test_where_flex_attention_fails_blocks_replace_it(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "failure", lambda *_: "RuntimeError: no compiler")
    shape = AttentionShape(1, 4096, 4, 128, "bf16", documents=True)
    backend = opened("cuda")
    backend.choose_attention("auto", shape)
    assert backend.attention is not None and backend.attention.kind == "blocked"
    assert "FlexAttention fails here: RuntimeError: no compiler" in backend.attention.reason
    attend(backend.kernels, shape)
    assert recorder.kinds == {"blocked"}


CAUSAL = AttentionShape(1, 1024, 4, 64, "bf16")


@pytest.mark.parametrize(("right", "failed"), [("cudnn", []), ("flash", ["cudnn"]), ("efficient", ["cudnn", "flash"])])
def test_the_first_kernel_whose_trial_is_right_is_pinned_and_announced(
    right: str, failed: list[str], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(sdpa_kernels, "failure", lambda kernel, *_: "" if kernel == right else "no kernel image")
    backend = opened("cuda")
    backend.choose_attention("auto", CAUSAL)
    assert backend.attention is not None and backend.attention.kind == right
    tried = [f"{other} fails here: no kernel image" for other in failed]
    assert backend.attention.reason.split("; ")[1:] == tried
    assert torch._C._get_sdp_priority_order()[0] == sdpa_kernels.BACKENDS[right].value


def test_where_no_kernel_is_right_auto_goes_block_by_block_and_a_wanted_one_ends_the_run(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa_kernels, "failure", lambda *_: "no kernel image")
    backend = opened("cuda")
    before = torch._C._get_sdp_priority_order()
    for params in ("bf16", "fp32"):
        backend.choose_attention("auto", replace(CAUSAL, params=params))
        assert backend.attention is not None and backend.attention.kind == "blocked"
        attend(backend.kernels, replace(CAUSAL, seq_len=4096))
        assert recorder.kinds == {"blocked"}
    with pytest.raises(BackendError, match=r"attention=cudnn cannot run on this GPU: .* no kernel image; use auto"):
        backend.choose_attention("cudnn", CAUSAL)
    assert torch._C._get_sdp_priority_order() == before


@pytest.mark.parametrize("wanted", ["sdpa", "cudnn", "flash", "flex", "plain"])
def test_a_kernel_that_is_asked_for_is_the_one_that_runs(wanted: str, recorder: Recorder) -> None:
    backend = opened("cuda")
    backend.choose_attention(wanted, CAUSAL)
    assert backend.attention is not None and backend.attention.kind == wanted
    attend(backend.kernels, CAUSAL)
    assert recorder.kinds == {"flex" if wanted == "flex" else "plain"}


@pytest.mark.parametrize(
    ("wanted", "change", "why"),
    [
        ("cudnn", {"params": "fp32"}, "takes bf16 and fp16"),
        ("flash3", {"params": "fp32"}, "takes bf16 and fp16"),
        ("sdpa", {"documents": True}, "sdpa takes no mask"),
        ("flash4", {"window": 16}, "a query sees 16 keys"),
        ("flex", {"cp": 2}, "flex takes whole rows"),
        ("flex", {"head_size": 8}, "FlexAttention takes 16 at least"),
    ],
)
def test_a_kernel_that_cannot_compute_a_shape_is_refused(
    wanted: str, change: dict[str, Any], why: str, recorder: Recorder
) -> None:
    with pytest.raises(ConfigError, match=rf"backend\.attention: {wanted} cannot be had: .*{why}"):
        opened("cuda").choose_attention(wanted, replace(CAUSAL, **change))


@pytest.mark.parametrize(("params", "kept"), [("fp32", "fused"), ("bf16", "grouped"), ("fp16", "grouped")])
def test_a_gpu_repeats_the_heads_of_float32_alone(params: str, kept: str, recorder: Recorder) -> None:
    """Of torch's kernels, the one for float32 takes no grouped heads, and the others need none repeated."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[params]
    q, kv = torch.randn(SHORT, 2, 4, 8, dtype=dtype), torch.randn(SHORT, 2, 2, 8, dtype=dtype)
    opened("cuda").kernels.attention(q, kv, kv)
    assert recorder.kinds == {"plain" if params == "fp32" else "grouped"}
    overrides = ["backend.name=cuda", f"precision.params={params}", "train.global_batch=1024"]
    overrides += ["precision.update=fp32_master"] if params != "fp32" else []
    prediction, _ = predict(TINY, overrides, Question(instance="p5.48xlarge", nodes=1), Assumptions())
    assert prediction.job.attention == kept


@pytest.mark.parametrize("name", ["neuron", "neuron-native", "cuda", "xla", "cpu"])
def test_a_flash_kernel_that_is_insisted_on_is_refused_with_documents(name: str, recorder: Recorder) -> None:
    for change, why in (({"documents": True}, "data.doc_mask=true"), ({"cp": 2}, "parallel.cp=2")):
        shape = replace(AttentionShape(1, 4096, 4, 128, "bf16"), **change)
        with pytest.raises(ConfigError, match=r"backend\.attention.*flash") as refused:
            opened(name).choose_attention("flash", shape)
        if name in ("neuron", "neuron-native", "cuda"):
            assert why in refused.value.problems[0].reason


@pytest.mark.parametrize("documents", ["true", "false"])
@pytest.mark.parametrize(
    ("name", "instance"),
    [
        ("cpu", ""),
        ("cuda", "p5.48xlarge"),
        ("xla", ""),
        ("neuron", "trn2.48xlarge"),
        ("neuron-native", "trn2.48xlarge"),
    ],
)
def test_doctor_graphs_and_plan_announce_what_the_run_does(
    name: str, instance: str, documents: str, recorder: Recorder, tmp_path: Path
) -> None:
    overrides = [
        f"backend.name={name}",
        f"data.doc_mask={documents}",
        f"cluster.instance={instance}",
        "model.preset=llama3.2-1b",
        *("train.global_batch=1024", "train.micro_batch=1"),
        *("train.seq_len=4096", "precision.params=bf16", "precision.update=fp32_master", "train.remat=none"),
    ]
    config = load(TINY, overrides).config
    resolved = resolve_config(load(TINY, overrides), 1, name)
    backend = opened(name)
    shape = AttentionShape.of(config, resolved.dimensions)
    backend.choose_attention(config.backend.attention, shape)
    announced = "" if backend.attention is None else str(backend.attention)
    if name == "cuda" and documents == "false":
        # Trials on the device come later: they take the first of the kernels that are named.
        assert backend.attention is not None and backend.attention.kind == "flash"
        announced = str(choose_torch("cuda", "auto", shape))
        assert "FlashAttention's" in announced

    machine = sick_machine.gpus(tmp_path / "m") if name == "cuda" else sick_machine.trainium(tmp_path / "m")
    findings = examine.examine(TINY, overrides, collectives=False, world=None, host=machine.host)
    assert [finding.what for finding in findings if finding.name == "attention"] == ([announced] if announced else [])

    chosen = choose(config)
    if documents == "true":
        assert backend.attention is not None
        assert any(backend.attention.reason in note for note in chosen.notes)

    machine_name = instance or "trn1.32xlarge"
    prediction, _ = predict(TINY, overrides, Question(instance=machine_name, nodes=1), Assumptions())
    is_blocked = backend.attention is not None and backend.attention.kind == "blocked"
    assert (prediction.job.attention == "blocked") == is_blocked
    shown = CliRunner().invoke(app, ["plan", str(TINY), *overrides, "--instance", machine_name, "--nodes", "1"])
    assert shown.exit_code == 0, shown.output
    assert ("data.doc_mask=true" in shown.output) == (documents == "true")
    assert ("cuDNN's, FlashAttention's" in shown.output) == (name == "cuda" and documents == "false")
    assert ("memory is linear in the sequence" in " ".join(shown.output.split())) == is_blocked
