"""Who may take part, and the batch that a learner gets first."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.allocator.joining import check_hello, first_batch
from gvm_stream.allocator.run_state import RunState
from gvm_stream.errors import StreamError
from gvm_stream.wire.link import identity_of
from gvm_stream.wire.messages import PROTOCOL, Hello
from tests.scripted_peers import config

AGREED = {"sampling.temperature": "1.0", "model.path": "model"}
PRODUCER = Hello(protocol=PROTOCOL, role="producer", name="p", epoch=31, agreed=AGREED)
LEARNER = msgspec.structs.replace(PRODUCER, role="learner")


def check(hello: Hello, identity: bytes = b"") -> None:
    check_hello(identity or identity_of(hello.role, hello.name, hello.epoch), hello, AGREED)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"protocol": PROTOCOL + 1}, f"it speaks protocol {PROTOCOL + 1}, the allocator {PROTOCOL}"),
        ({"agreed": {**AGREED, "model.path": "b"}}, "model.path = b, the allocator's has model: they must be the same"),
        ({"agreed": {}}, "sampling.temperature = nothing, the allocator's has 1.0"),
    ],
)
def test_a_process_that_does_not_fit_is_told_which_value(changes: dict[str, Any], sentence: str) -> None:
    check(PRODUCER)
    with pytest.raises(StreamError, match=sentence):
        check(msgspec.structs.replace(PRODUCER, **changes))


def test_more_values_than_agreed_upon_do_no_harm_and_observers_need_none() -> None:
    check(msgspec.structs.replace(PRODUCER, agreed={**AGREED, "of.later": "1"}))
    check(msgspec.structs.replace(PRODUCER, role="observer", agreed={}))


@pytest.mark.parametrize("identity", [b"producer/p/1e", b"producer/q/1f", b"learner/p/1f", b"\xff", b"producer/p/1F"])
def test_nobody_says_hello_for_somebody_else(identity: bytes) -> None:
    with pytest.raises(StreamError, match="its hello is not of the process that its socket belongs to"):
        check(PRODUCER, identity)


def state(*, settled: int, covered: int) -> RunState:
    made = RunState(config(), ["train-1"], [])
    made.allocator.settled_steps, made.covered = settled, covered
    return made


def first(*, settled: int, covered: int = 0, checkpoints: tuple[int, ...] = (), step: int | None = None) -> int:
    hello = msgspec.structs.replace(LEARNER, checkpoints=checkpoints, step=step)
    return first_batch(hello, state(settled=settled, covered=covered))


def test_a_learner_starts_from_the_newest_checkpoint_that_the_allocator_has_settled() -> None:
    assert first(settled=0) == 0
    assert first(settled=5) == 0  # it died before its first checkpoint
    assert first(settled=5, checkpoints=(2, 4)) == 4
    assert first(settled=5, covered=2, checkpoints=(2, 4)) == 4
    assert first(settled=5, covered=4, checkpoints=(4, 6)) == 4  # 6 is of a step that was never written down


@pytest.mark.parametrize(("covered", "checkpoints"), [(2, ()), (4, (2,)), (4, (6, 8))])
def test_a_learner_without_a_fitting_checkpoint_is_refused(covered: int, checkpoints: tuple[int, ...]) -> None:
    with pytest.raises(StreamError, match=rf"stands after 5 and can give batches from {covered} on again"):
        first(settled=5, covered=covered, checkpoints=checkpoints)


@pytest.mark.parametrize("step", [3, 4, 5, 6])
def test_a_learner_that_lives_goes_on_where_it_is(step: int) -> None:
    assert first(settled=5, covered=3, step=step, checkpoints=(3,)) == step


@pytest.mark.parametrize("step", [-1, 2, 7])
def test_a_learner_of_another_history_is_refused(step: int) -> None:
    with pytest.raises(StreamError, match=f"it has been through {step} batches, the allocator stands after 5"):
        first(settled=5, covered=3, step=step)


steps = st.integers(0, 9)


@given(settled=steps, covered=steps, checkpoints=st.lists(steps, max_size=4), step=st.none() | steps)
def test_no_learner_is_handed_what_is_gone_or_skips_what_is_settled(
    settled: int, covered: int, checkpoints: list[int], step: int | None
) -> None:
    try:
        begin = first(settled=settled, covered=covered, checkpoints=tuple(checkpoints), step=step)
    except StreamError:
        return
    assert covered <= begin <= settled + (step is not None)
    assert begin == step or begin in {0, *checkpoints}
