"""The file for Prometheus: drawn records against the grammar of the format, and hostile names of runs."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxtrain.metrics.sinks import PrometheusSink, text_of

LINE = re.compile(r'(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\{run="(?P<label>(?:[^"\\\n]|\\\\|\\"|\\n)*)"\} (?P<value>\S+)')
"""A sample of https://prometheus.io/docs/instrumenting/exposition_formats, with one label."""

ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
NUMBERS = st.one_of(st.floats(), st.integers(-(10**12), 10**12))
OTHERS = st.sampled_from([None, "spike: loss", True, (3, 1)])
NAMES = st.text(st.sampled_from('a"\\n\n{}= \xe9'), max_size=9)
KEYS = st.text(st.sampled_from("abc_012"), min_size=1, max_size=5)


@given(
    st.dictionaries(KEYS, st.one_of(NUMBERS, OTHERS), max_size=6),
    st.text(st.sampled_from('a"\\n\n{}= \xe9'), max_size=9),
)
def test_each_number_is_a_gauge_and_reads_back(record: dict[str, object], run: str) -> None:
    *lines, last = text_of(record, run).split("\n")
    assert not last
    found: dict[str, float] = {}
    for kind, line in zip(lines[::2], lines[1::2], strict=True):
        sample = LINE.fullmatch(line)
        assert sample, line
        assert kind == f"# TYPE {sample['name']} gauge"
        assert re.sub(r'\\\\|\\"|\\n', lambda each: ESCAPES[each[0]], sample["label"]) == run
        found[sample["name"]] = float(sample["value"])
    numbers = {k: v for k, v in record.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    assert found == pytest.approx(
        {f"nxtrain_{key}": float(value) for key, value in numbers.items()}, nan_ok=True, rel=0
    )


def test_the_file_has_the_newest_record_only(tmp_path: Path) -> None:
    sink = PrometheusSink(tmp_path / "prometheus.prom", "demo")
    sink.log({"step": 1, "loss": 2.5})
    sink.log({"step": 2, "loss": math.nan, "alarm": "spike"})
    sink.close()
    text = (tmp_path / "prometheus.prom").read_text(encoding="utf-8")
    assert text.splitlines()[1::2] == ['nxtrain_step{run="demo"} 2.0', 'nxtrain_loss{run="demo"} NaN']
    assert [path.name for path in tmp_path.iterdir()] == ["prometheus.prom"]
