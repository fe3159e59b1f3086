"""Numbers and lists for people: short, near the number, with a unit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nxtrain.common.text import duration, indented, listed, short, size


@given(st.floats(-1e300, 1e300))
def test_a_short_number_is_short_and_near_the_number(value: float) -> None:
    text = short(value)
    assert len(text) <= 10
    factor = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1.0)
    read = float(text.rstrip("kMGT").replace(",", "")) * factor
    assert abs(read - value) <= 0.006 * abs(value)


def test_durations_have_their_unit() -> None:
    assert [duration(s) for s in (4.2e-5, 0.0034)] == ["0.042 ms", "3.4 ms"]
    assert [duration(s) for s in (0, 0.02, 1.5, 119, 150, 7300, 200_000)] == [
        *("0.0 s", "20 ms", "1.5 s", "119.0 s", "2.5 min", "2.0 h", "2.3 days")
    ]


def test_sizes_have_their_unit() -> None:
    sizes = (0, 1023, 1024, 3 << 20, 5 * 10**8, 123 * 10**9, 3 << 40)
    assert [size(num_bytes) for num_bytes in sizes] == [
        *("0 B", "1023 B", "1.00 KiB", "3.00 MiB", "476.84 MiB", "114.55 GiB", "3.00 TiB")
    ]


@given(st.lists(st.integers(), max_size=9), st.integers(1, 5))
def test_the_first_values_are_listed_and_the_others_counted(values: list[int], most: int) -> None:
    shown, _, rest = listed(values, most).partition(" and ")
    assert [int(text) for text in shown.split(", ") if text] == values[:most]
    lines = indented([str(value) for value in values], most).split("\n    ")
    assert lines[: most + 1] == ["", *map(str, values[:most])]
    if len(values) > most:
        assert rest == f"{len(values) - most} more" and lines[most + 1 :] == [f"and {rest}"]
    else:
        assert rest == "" and len(lines) == len(values) + 1
