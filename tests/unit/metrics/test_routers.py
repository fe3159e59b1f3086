"""Dead experts and collapsed routers are named once, within 50 steps, and a balanced router never."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random

import pytest

from nxtrain.metrics import routers
from nxtrain.metrics.routers import Loads, RouterWatch, router_numbers

NUM_EXPERTS, K, TOKENS = 8, 2, 512


def row(shares: Sequence[float], entropy: float = 1.0, dropped: int = 0) -> list[float]:
    """Load of a block whose experts have some shares of the slots."""
    slots = [round(share / sum(shares) * K * TOKENS) for share in shares]
    slots[-1] += K * TOKENS - sum(slots)
    return [*map(float, slots), float(TOKENS), entropy * TOKENS, float(dropped)]


def even(rng: Random) -> list[float]:
    return row([rng.uniform(0.5, 1.5) for _ in range(NUM_EXPERTS)])


def collapsed(rng: Random) -> list[float]:
    """Nearly all tokens have the experts 2 and 5."""
    return row([30.0 if expert in {2, 5} else rng.uniform(0.1, 0.5) for expert in range(NUM_EXPERTS)])


def dead(rng: Random) -> list[float]:
    """One expert has no token."""
    return row([0.0 if expert == 3 else rng.uniform(0.5, 1.5) for expert in range(NUM_EXPERTS)])


DENSE = [0.0] * (NUM_EXPERTS + 3)


def alarms(of_steps: Mapping[int, Loads], watch: RouterWatch | None = None) -> dict[int, str]:
    """Texts of the records that have an alarm, by step."""
    watch = watch or RouterWatch()
    texts = {step: watch.see(step, loads) for step, loads in of_steps.items()}
    return {step: text for step, text in texts.items() if text}


def history(every: int, broken_from: int, kind: str, steps: int = 200) -> dict[int, Loads]:
    """Records of a run in which the router of block 1 breaks at a step; block 0 has no experts."""
    rng = Random(every)
    make = {"collapsed": collapsed, "dead": dead, "even": even}[kind]
    return {
        step: [DENSE, make(rng) if step >= broken_from else even(rng), even(rng)]
        for step in range(every, steps + 1, every)
    }


@pytest.mark.parametrize("every", [1, 2, 7, 10, 25])
@pytest.mark.parametrize("broken_from", [1, 13, 50, 101])
@pytest.mark.parametrize("kind", ["collapsed", "dead"])
def test_a_broken_router_is_named_once_within_50_steps(every: int, broken_from: int, kind: str) -> None:
    ((step, text),) = alarms(history(every, broken_from, kind)).items()
    assert broken_from + routers.SUSTAINED <= step < broken_from + 50
    if kind == "collapsed":
        assert text == "the router of block 1 collapsed: for 20 steps nearly all tokens chose the same experts"
    else:
        assert text == "dead expert, without a token for 20 steps: 3 of block 1"


def test_a_router_in_balance_is_never_named() -> None:
    assert alarms(history(1, 1, "even", steps=500)) == {}


def test_a_router_that_recovers_is_not_named_and_one_that_breaks_again_is_named_again() -> None:
    rng = Random(0)
    short = {step: [collapsed(rng) if step % 30 < 15 else even(rng)] for step in range(1, 200)}
    assert alarms(short) == {}
    long = {step: [dead(rng) if step % 100 < 60 else even(rng)] for step in range(100, 300)}
    assert list(alarms(long)) == [120, 220]


def test_experts_that_take_every_token_are_no_collapse() -> None:
    """A router without a choice gives all experts all tokens."""
    whole: Loads = [[100.0, 100.0, 100.0, 5.0, 0.0]]
    assert alarms(dict.fromkeys(range(1, 60), whole)) == {}


def test_many_dead_experts_make_a_short_text() -> None:
    shares = [1.0 if expert < 4 else 0.0 for expert in range(NUM_EXPERTS - 1)]
    blocks: Loads = [[*row([*shares, 1.0])] for _ in range(3)]
    ((_, text),) = alarms(dict.fromkeys(range(1, 30), blocks)).items()
    assert text.endswith("4 of block 0, 5 of block 0, 6 of block 0, 4 of block 1, 5 more")


def test_findings_survive_a_checkpoint() -> None:
    records = history(5, 20, "dead")
    want = alarms(records)
    for stop in range(5, 200, 5):
        watch = RouterWatch()
        actual = alarms({step: loads for step, loads in records.items() if step <= stop}, watch)
        resumed = RouterWatch()
        resumed.restore(json.loads(json.dumps(watch.state())))
        actual |= alarms({step: loads for step, loads in records.items() if step > stop}, resumed)
        assert actual == want


@pytest.mark.parametrize(("name", "value"), [("SUSTAINED", 60), ("CONCENTRATED", 1.01)])
def test_a_blind_watch_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    monkeypatch.setattr(routers, name, value)
    assert not [step for step in alarms(history(10, 13, "collapsed")) if step < 63]


def test_the_numbers_of_a_record() -> None:
    first = row([1.0] * 7 + [9.0], entropy=1.5, dropped=64)
    second = row([1.0] * 8, entropy=0.5)
    result = router_numbers([first, DENSE, second])
    assert result == {
        "expert_load_min": pytest.approx(0.5),
        "expert_load_max": pytest.approx(4.5),
        "router_entropy": pytest.approx(1.0 / 2.0794415),
        "dropped_share": 64 / 2048,
        "expert_slots": [[64] * 7 + [576], [0] * 8, [128] * 8],
    }
