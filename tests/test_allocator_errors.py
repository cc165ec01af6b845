"""What an allocator refuses: it says why, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest

from gvm_stream.allocator import Fate, OnlineAllocator, Reception, Scored, Told, Unscorable
from gvm_stream.allocator.types import Cancelled, Expired, Failed, Outcome
from tests.allocator_host import allocator, scored, state, tell, tell_all, train

NAN, INF = float("nan"), float("inf")

BAD: list[tuple[Outcome, str]] = [
    (scored(NAN), "reward nan"),
    (scored(-INF), "reward -inf"),
    (scored(1.5), "reward 1.5, expected 0 to 1"),
    (scored(-0.1), "reward -0.1, expected 0 to 1"),
    (scored(energy=NAN), "energy nan, expected a finite number of at least 0"),
    (scored(energy=INF), "energy inf"),
    (scored(energy=-1.0), "energy -1.0"),
    # The state could not be saved with these.
    (scored(cast("float", np.float32(1))), "reward 1.0 of type float32, expected a float"),
    (scored(True), "reward True of type bool, expected a float"),
    (scored(energy=np.float64(1)), "energy 1.0 of type float64, expected a float"),
    (scored(tokens=cast("int", np.int64(5))), "tokens = 5 of type int64, expected an int"),
    (scored(tokens=-1), "-1 tokens, expected 0 or more"),
    (Scored(reward=1.0, tokens=1, seconds=-1.0, oldest_version=0), "-1.0 seconds, expected 0 or more"),
    (Scored(reward=1.0, tokens=1, seconds=NAN, oldest_version=0), "nan seconds"),
    (Scored(reward=1.0, tokens=1, seconds=1.0, oldest_version=3, newest_version=2), "newest version 2 is older .* 3"),
    (Unscorable(reason="?", tokens=1, seconds=-2.0), "-2.0 seconds"),
    (Unscorable(reason="?", tokens=-1, seconds=1.0), "-1 tokens"),
    (Cancelled(reason="stop", tokens=-3), "-3 tokens"),
    (Failed(reason="crash", tokens=-3), "-3 tokens"),
    (Expired(reason="silent", tokens=-3), "-3 tokens"),
]


def in_the_middle() -> OnlineAllocator:
    """One batch settled, one complete, one half done, one rollout waiting to be made again."""
    a = allocator(max_lag=2, reward_range=(0.0, 1.0))
    tell_all(a, a.ask(6, 0), scored())
    train(a, 1)
    tell_all(a, a.ask(6, 1), scored())
    items = a.ask(6, 1)
    tell_all(a, items[:2], scored())
    tell(a, items[2], Failed(reason="crash"))
    return a


@pytest.mark.parametrize(("bad", "sentence"), BAD, ids=[sentence for _, sentence in BAD])
def test_an_outcome_that_is_none_changes_nothing(bad: Outcome, sentence: str) -> None:
    a = in_the_middle()
    before = state(a)
    work = a.ledger.running()[0].work
    with pytest.raises(ValueError, match=f"work {work}: {sentence}"):
        a.tell(work, 0, bad)
    assert state(a) == before
    assert a.tell(work, 0, scored()).kept


@pytest.mark.parametrize("energy", [NAN, INF, -INF, -1.0])
def test_a_late_energy_that_is_none_changes_nothing(energy: float) -> None:
    a = in_the_middle()
    before = state(a)
    with pytest.raises(ValueError, match=f"work 7: energy {energy}, expected a finite number of at least 0"):
        a.observe_energy(7, energy)
    assert state(a) == before
    assert a.observe_energy(7, 0.0)


@pytest.mark.parametrize(("work", "attempt"), [(0, 0), (-1, 0), (999, 0)])
def test_work_that_was_never_issued_is_counted_and_ignored(work: int, attempt: int) -> None:
    a = in_the_middle()
    assert a.tell(work, attempt, scored()) == Told(Reception.UNKNOWN)
    assert not a.observe_energy(work, 1.0)
    other = in_the_middle()
    other.ledger.unknown += 1
    assert state(a) == state(other)


@pytest.mark.parametrize(("work", "attempt"), [(1, 0), (13, 0), (15, 0), (16, 7)])
def test_attempts_that_have_ended_or_not_begun_are_counted_and_ignored(work: int, attempt: int) -> None:
    a = in_the_middle()
    assert a.tell(work, attempt, scored(0.0)) == Told(Reception.DUPLICATE)
    other = in_the_middle()
    other.ledger.duplicates += 1
    assert state(a) == state(other)


WRONG: list[tuple[Callable[[OnlineAllocator], object], type[Exception], str]] = [
    (lambda a: a.ask(-1, 0), ValueError, "-1 slots were asked for, expected 0 or more"),
    (lambda a: a.add(["new", "train-0"]), ValueError, "prompt 'train-0' is there already"),
    (lambda a: a.add(["new", "new"]), ValueError, "prompt 'new' is there already"),
    (lambda a: a.add(["new", cast("str", 7)]), ValueError, "prompt 7 of type int, expected a text"),
    (lambda a: a.draw_from([], 0), ValueError, "window = 0 must be at least 1"),
    (lambda a: a.quarantine("nobody"), KeyError, "nobody"),
    (lambda a: a.explain("nobody"), KeyError, "nobody"),
    (lambda a: a.drop(2, "closed"), KeyError, "group 2 is not open"),
    (lambda a: a.drop(99, "unknown"), KeyError, "group 99 is not open"),
    (lambda a: a.settle(2, 2, {}), ValueError, "batch 2 cannot be settled: the next complete one would be 1"),
    (lambda a: a.settle(7, 2, {}), ValueError, "batch 7 cannot be settled"),
    (lambda a: a.settle(1, 0, {Fate.TRAINED: range(7, 13)}), ValueError, "version 0 is older than 1"),
    (lambda a: a.settle(1, 2, {}), ValueError, "name 0 rollouts, the batch has 6; 6 are not in both"),
    (lambda a: a.settle(1, 2, {Fate.TRAINED: range(7, 12)}), ValueError, "name 5 rollouts, the batch has 6; 1"),
    (lambda a: a.settle(1, 2, {Fate.TRAINED: range(8, 14)}), ValueError, "name 6 rollouts, the batch has 6; 2"),
    (
        lambda a: a.settle(1, 2, {Fate.TRAINED: range(7, 13), Fate.STALE: [7]}),
        ValueError,
        "name 7 rollouts, the batch has 6; 0",
    ),
    (lambda a: a.settle(1, 2, {Fate.PENDING: range(7, 13)}), ValueError, "pending is not the fate of a settled"),
    (lambda a: a.load_state_dict({**a.state_dict(), "format": 9}), ValueError, "format 9, expected 4"),
    (lambda a: a.load_state_dict({}), ValueError, "format None, expected 4"),
    (lambda a: a.load_state_dict(allocator(3).state_dict()), ValueError, "other ones than the 5 of this allocator"),
]


@pytest.mark.parametrize(("call", "error", "sentence"), WRONG, ids=[sentence for _, _, sentence in WRONG])
def test_a_call_that_makes_no_sense_changes_nothing(
    call: Callable[[OnlineAllocator], object], error: type[Exception], sentence: str
) -> None:
    a = in_the_middle()
    before = state(a)
    with pytest.raises(error, match=sentence):
        call(a)
    assert state(a) == before
    a.settle(1, 2, {Fate.TRAINED: iter(range(7, 9)), Fate.ZERO_SIGNAL: iter(range(9, 12)), Fate.STALE: iter([12])})
    assert {fate.value: n for fate, n in a.account.tokens.items() if n} == {
        "trained": 80,
        "zero_signal": 30,
        "stale": 10,
        "pending": 20,
    }


def test_a_source_that_repeats_itself_is_refused_until_it_is_replaced() -> None:
    a = allocator(1, max_lag=0)
    a.draw_from(iter(["s0", "train-0", "s1"]), window=4)
    before = state(a)
    for _ in range(2):
        with pytest.raises(ValueError, match="prompt 'train-0' is there already"):
            a.ask(9, 0)
        assert state(a) == before
    a.draw_from(["s0", "s1"], window=4)
    assert {item.prompt for item in a.ask(9, 0)} == {"s0", "s1"}
