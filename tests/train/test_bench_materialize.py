"""A rank of a model of hundreds of gigabytes takes the memory of its own shard."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nxtrain.common.errors import BackendError
from nxtrain.tools.bench import materialize
from tests.support.ports import patient_s

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")

MIB = 1 << 20


@pytest.mark.parametrize(
    ("preset", "num_params", "blocks", "shard_params"),
    [
        # By hand, of a block: q and o, k and v of which four ranks hold each head, gate and up and down, two norms.
        (
            "llama2-70b",
            68_976_648_192,
            [40, 49],
            10 * ((2 * 8192**2 + 4 * 2 * 1024 * 8192 + 3 * 8192 * 28_672) // 32 + 2 * 8192),
        ),
        pytest.param(
            "llama3.1-405b",
            405_853_388_800,
            [63, 78],  # 126 blocks: 15 to the last stage, which projects to scores, and to the first
            16 * ((2 * 16_384**2 + 4 * 2 * 1024 * 16_384 + 3 * 16_384 * 53_248) // 32 + 2 * 16_384),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_shard_of_tp_32_and_pp_8_is_made_in_bounded_memory(
    preset: str, num_params: int, blocks: list[int], shard_params: int
) -> None:
    """The bound counts the interpreter and torch; what is added must be the shard and little else."""
    argv = [sys.executable, "-m", "nxtrain", "bench", "materialize", "--preset", preset, "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=patient_s(280), check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["tp"], found["pp"], found["stage"]) == (32, 8, 4)
    assert (found["num_params"], found["blocks"]) == (num_params, blocks)
    assert found["shard_params"] == shard_params
    assert found["shard_bytes"] == 2 * shard_params
    assert found["peak_bytes"] <= found["bound_bytes"] == int(1.3 * found["shard_bytes"]) + (1 << 30)
    assert found["within"] is True
    added = found["peak_bytes"] - found["before_bytes"]
    assert 0.95 * found["shard_bytes"] < added < found["shard_bytes"] + 64 * MIB


def test_a_peak_over_the_bound_is_printed_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(materialize, "SLACK_BYTES", 0)  # torch alone takes more
    with pytest.raises(BackendError, match="exceeds"):
        materialize.bench_materialize(preset="tiny", tp=2, pp=2, stage=0, as_json=True)
    assert json.loads(capsys.readouterr().out)["within"] is False
