"""Lines on standard error, which have the texts of users and of libraries as they are."""

from __future__ import annotations

import pytest

from nxtrain.common.process.console import standard_error


@pytest.mark.parametrize(
    "text",
    [
        "no checkpoint of step 3: [enforce fail at inline_container.cc:595]",
        "run.dir=/runs/[lr=3e-4]/a",
        "run.dir=/runs/[2026/11",
        "put aside: /runs/[a[/b]",
        "run.dir=/runs/:cat:/a",
    ],
)
def test_a_line_is_printed_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    standard_error().print(text)
    assert capsys.readouterr().err == f"{text}\n"
