"""The announced attention is the one that runs: on every backend, with documents and without.

Each backend chooses for drawn shapes. Its kernels then compute a small attention, whose calls of torch and of a flash
kernel are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from typer.testing import CliRunner

from nxtrain.backends.attention_choice import AttentionShape, choose_torch
from nxtrain.backends.limits import block_rows
from nxtrain.cli.main import app
from nxtrain.common.errors import ConfigError
from nxtrain.config.check import resolve_config
from nxtrain.config.load import load
from nxtrain.nn.attention import CausalAttention
from nxtrain.plan.command import Question, predict
from nxtrain.plan.predict import Assumptions
from nxtrain.tools.doctor import examine
from nxtrain.tools.trace.choice import choose
from tests.support import TINY, sick_machine
from tests.support.attention_calls import SHORT, Recorder, attend, opened, recorded_calls

BACKENDS = ("cpu", "cpu compiled", "cuda", "xla", "neuron", "neuron-native")
DRAWS = 48


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Recorder of the calls of this test."""
    with recorded_calls(monkeypatch) as recorder:
        yield recorder


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
        actual = backend.attention
        announced.add(actual.kind if actual else "")
        lines = [note for note in backend.notes() if "attention: " in note]
        assert lines == ([str(actual)] if actual else [])
        if actual is None:
            assert recorder.kinds <= {"plain", "grouped"}
            continue
        ran = {"grouped": "flash"} if name == "neuron-native" else {}
        if name == "cuda" and actual.kind in ("flash", "efficient") and not shape.limits:
            # The recorder's tensors are float32 on a CPU, so that heads are repeated.
            ran = {"plain": actual.kind}
        kinds = {ran.get(kind, kind) for kind in recorder.kinds}
        assert actual.kind in kinds if actual.kind == "per-document" else kinds == {actual.kind}
        assert ("seq_len^2" in str(actual)) == (actual.kind == "plain")
        assert ("linear in the sequence" in str(actual)) == (actual.kind == "blocked")
        if shape.cp > 1 and wanted == "auto":
            assert "parallel.cp=2" in str(actual)
    expected = {"flash", "plain"} if name.startswith("neuron") else {""}
    if name == "cuda":
        expected = {"flash", "efficient", "plain"}
    if documents:
        expected = {"cpu": {"per-document"}, "cuda": {"flash", "flex"}}.get(name, set())
    assert announced == {"blocked", *expected}


def test_the_scores_of_a_block_are_those_of_the_blocks_that_run(recorder: Recorder) -> None:
    """Sizes in the announced line are those of the spans of queries and keys."""
    shape = AttentionShape(2, 4096, 8, 64, "fp32", documents=True)
    cost = shape.blocks_cost("xla")
    assert (rows := block_rows(16, 4096)) == 256
    assert f"Each of 16 blocks of {rows} queries" in cost
    assert f"at most {2 * 8 * rows * 4096 * 4 / 2**20:.3g} MiB" in cost
    assert "up to those of its loop" in cost
    assert "rounds of at most 4 loops" in cost
    assert "up to its own" in shape.blocks_cost("cuda")
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
        assert backend.attention.kind == ("flash" if name == "cuda" else "blocked")
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
    assert backend.attention.kind == ("flash" if name == "cuda" else "blocked")
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


@pytest.mark.parametrize("name", ["neuron", "neuron-native", "xla", "cpu"])
def test_a_flash_kernel_that_is_insisted_on_is_refused_with_documents(name: str, recorder: Recorder) -> None:
    for change, why in (({"documents": True}, "data.doc_mask=true"), ({"cp": 2}, "parallel.cp=2")):
        shape = replace(AttentionShape(1, 4096, 4, 128, "bf16"), **change)
        with pytest.raises(ConfigError, match=r"backend\.attention.*flash") as refused:
            opened(name).choose_attention("flash", shape)
        if name in ("neuron", "neuron-native"):
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
