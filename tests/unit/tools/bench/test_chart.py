"""Bars of a chart are as long as their values."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from nxtrain.common.errors import ConfigError
from nxtrain.tools.bench.chart import LABEL, WIDTH, check_chart, write_chart


def test_a_bar_is_as_long_as_its_value_and_names_are_escaped(tmp_path: Path) -> None:
    machine = {"cpu": "CPU", "instructions": ["avx2"]}
    write_chart(tmp_path / "a.svg", {"a<b": [1.5, 2.0, 4.0], "c": [0.5]}, "title & more", machine)
    root = ET.parse(tmp_path / "a.svg").getroot()
    widths = [float(rect.get("width", "")) for rect in root.findall("{*}rect")[1:]]
    assert widths == [WIDTH / 2, WIDTH / 8]
    *ranges, one = root.findall("{*}line")
    assert (ranges[0].get("x1"), ranges[0].get("x2")) == (f"{LABEL + WIDTH * 3 / 8:.1f}", f"{LABEL + WIDTH:.1f}")
    assert one.get("x1") == f"{LABEL + WIDTH / 4:.1f}"
    assert "a<b" in [text.text for text in root.findall("{*}text")]


def test_a_chart_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    check_chart(None)
    check_chart(tmp_path / "a.svg")
    with pytest.raises(ConfigError, match=r"a\.png is not an SVG"):
        check_chart(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_chart(tmp_path / "none" / "a.svg")
