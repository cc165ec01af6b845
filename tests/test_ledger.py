from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test

from gvm_stream.allocator import Cancelled, Failed, Fate, Reception, Scored, Unscorable, WorkItem
from gvm_stream.allocator.account import TokenAccount
from gvm_stream.allocator.ledger import Ledger
from gvm_stream.allocator.types import Expired, Outcome


def issue(ledger: Ledger) -> WorkItem:
    return ledger.issue(group=0, prompt="train-1", index=0, step=0, min_version=0, reason="test")


tokens = st.integers(0, 50)
outcomes: st.SearchStrategy[Outcome] = st.one_of(
    st.builds(Scored, reward=st.just(1.0), tokens=tokens, seconds=st.just(1.0), oldest_version=st.just(0)),
    st.builds(Unscorable, reason=st.just("no verdict"), tokens=tokens, seconds=st.just(1.0)),
    st.builds(Cancelled, reason=st.just("stop"), tokens=tokens),
    st.builds(Failed, reason=st.just("error"), tokens=tokens),
    st.builds(Expired, reason=st.just("dead"), tokens=tokens),
)


class Reports(RuleBasedStateMachine):
    """Attempts are issued and reported in any order, twice, late, or without ever having been issued."""

    items = Bundle("items")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.latest: dict[int, WorkItem] = {}
        self.ended: dict[tuple[int, int], Outcome] = {}
        self.spent: dict[tuple[int, int], int] = {}
        """Tokens of every attempt, as far as anybody has ever honestly said."""
        self.counted = 0

    @rule(target=items)
    def issue(self) -> WorkItem:
        item = issue(self.ledger)
        assert item.work not in self.latest
        self.latest[item.work] = item
        return item

    @rule(target=items, item=items)
    def try_again(self, item: WorkItem) -> object:
        latest = self.latest[item.work]
        if (latest.work, latest.attempt) not in self.ended:
            with pytest.raises(ValueError, match="still running"):
                self.ledger.reissue(latest)
            return multiple()
        again = self.latest[item.work] = self.ledger.reissue(latest)
        assert (again.work, again.attempt) == (latest.work, latest.attempt + 1)
        return again

    @rule(item=items, outcome=outcomes)
    def report(self, item: WorkItem, outcome: Outcome) -> None:
        attempt = (item.work, item.attempt)
        settlement = self.ledger.settle(*attempt, outcome)
        self.counted += settlement.tokens
        before = self.ended.get(attempt)
        if before is None:
            assert settlement == (Reception.ACCEPTED, item, outcome.tokens)
            self.ended[attempt], self.spent[attempt] = outcome, outcome.tokens
            return
        assert (settlement.reception, settlement.item) == (Reception.DUPLICATE, None)
        if isinstance(before, Expired):
            # Its owner reports after all: once, so a second time adds nothing.
            self.spent[attempt] = max(self.spent[attempt], outcome.tokens)
            self.ended[attempt] = outcome if not isinstance(outcome, Expired) else Failed(reason="late")

    @rule(outcome=outcomes, ahead=st.integers(0, 3))
    def report_what_was_never_issued(self, outcome: Outcome, ahead: int) -> None:
        assert self.ledger.settle(len(self.latest) + 1 + ahead, 0, outcome) == (Reception.UNKNOWN, None, 0)
        assert self.ledger.settle(-1 - ahead, 0, outcome) == (Reception.UNKNOWN, None, 0)

    @rule(item=items, outcome=outcomes)
    def report_an_attempt_of_the_future(self, item: WorkItem, outcome: Outcome) -> None:
        attempt = self.latest[item.work].attempt + 1
        assert self.ledger.settle(item.work, attempt, outcome) == (Reception.DUPLICATE, None, 0)

    @invariant()
    def conserved(self) -> None:
        ledger = self.ledger
        assert ledger.conserved()
        assert ledger.issued == sum(item.attempt + 1 for item in self.latest.values())
        assert sum(ledger.ended.values()) == len(self.ended)
        running = [item for item in self.latest.values() if (item.work, item.attempt) not in self.ended]
        assert sorted(item.work for item in ledger.running()) == [item.work for item in running]

    @invariant()
    def every_token_counts_once(self) -> None:
        assert self.counted == self.ledger.tokens == sum(self.spent.values())


def test_attempts_and_tokens_are_conserved_whatever_is_reported_when() -> None:
    run_state_machine_as_test(Reports, settings=settings(max_examples=60, stateful_step_count=30, deadline=None))


def test_a_second_attempt_is_not_ended_by_the_report_of_the_first() -> None:
    ledger = Ledger()
    first = issue(ledger)
    ledger.settle(first.work, 0, Expired(reason="silent", tokens=7))
    second = ledger.reissue(first)
    late = Scored(reward=1.0, tokens=30, seconds=1.0, oldest_version=0)
    assert ledger.settle(first.work, 0, late) == (Reception.DUPLICATE, None, 23)
    assert ledger.settle(first.work, 0, late) == (Reception.DUPLICATE, None, 0)
    assert ledger.running() == [second]
    assert ledger.settle(first.work, 1, late) == (Reception.ACCEPTED, second, 30)
    assert (ledger.issued, ledger.num_running, ledger.duplicates) == (2, 0, 2)


def test_two_ledgers_of_opposite_stride_share_no_identity() -> None:
    up, down = Ledger(), Ledger(stride=-1)
    assert [issue(up).work for _ in range(3)] == [1, 2, 3]
    assert [issue(down).work for _ in range(3)] == [-1, -2, -3]
    end = Failed(reason="error")
    assert down.settle(1, 0, end).reception is Reception.UNKNOWN
    assert down.settle(-4, 0, end).reception is Reception.UNKNOWN
    assert down.settle(-3, 0, end).reception is Reception.ACCEPTED
    assert up.settle(0, 0, end).reception is down.settle(0, 0, end).reception is Reception.UNKNOWN


Move = tuple[str, Fate, Fate, int]
fates = st.sampled_from(Fate)


@given(st.lists(st.tuples(st.sampled_from(["add", "extend", "move"]), fates, fates, st.integers(-3, 30)), max_size=40))
def test_fates_add_up_to_what_was_generated(moves: list[Move]) -> None:
    account, generated, rollouts = TokenAccount(), 0, 0
    for action, source, target, n in moves:
        before = (account.tokens.copy(), account.rollouts.copy())
        if action == "extend":
            account.extend(target, abs(n))
            generated += abs(n)
        elif action == "add" and n >= 0:
            account.add(target, n)
            generated, rollouts = generated + n, rollouts + 1
        elif action == "add":
            with pytest.raises(ValueError, match="cannot have"):
                account.add(target, n)
            assert (account.tokens, account.rollouts) == before
        elif account.rollouts[source] >= 1 and 0 <= n <= account.tokens[source]:
            account.move(source, target, n)
        else:
            with pytest.raises(ValueError, match="cannot move"):
                account.move(source, target, n)
            assert (account.tokens, account.rollouts) == before
        assert account.generated == generated == sum(account.tokens.values())
        assert sum(account.rollouts.values()) == rollouts
        assert min((*account.tokens.values(), *account.rollouts.values()), default=0) >= 0


def test_a_loaded_account_is_the_saved_one_until_what_is_pending_is_written_off() -> None:
    account = TokenAccount()
    account.add(Fate.PENDING, 10)
    account.add(Fate.PENDING, 5)
    account.add(Fate.CANCELLED, 1)
    account.move(Fate.PENDING, Fate.TRAINED, 5)
    loaded = TokenAccount()
    loaded.load_state_dict(account.state_dict())
    assert (loaded.table(), loaded.rollouts) == (account.table(), account.rollouts)
    loaded.close()
    assert loaded.table() == {**account.table(), "pending": 0, "cancelled": 11}
    assert loaded.rollouts == {Fate.TRAINED: 1, Fate.CANCELLED: 2}


def test_a_loaded_ledger_goes_on_where_the_saved_one_was() -> None:
    ledger = Ledger()
    first, second, third = (issue(ledger) for _ in range(3))
    ledger.settle(first.work, 0, Expired(reason="silent", tokens=7))
    ledger.settle(second.work, 0, Cancelled(reason="stop", tokens=2))
    ledger.settle(99, 0, Failed(reason="whose?"))
    loaded = Ledger()
    loaded.load_state_dict(msgspec.msgpack.decode(msgspec.msgpack.encode(ledger.state_dict())))
    assert loaded.state_dict() == ledger.state_dict()
    assert loaded.conserved()
    assert loaded.running() == [third]
    assert (loaded.attempt_of(third.work), loaded.attempt_of(first.work)) == (0, None)
    assert (loaded.item(third.work), loaded.item(first.work), loaded.tokens) == (third, None, 9)
    assert loaded.settle(first.work, 0, Failed(reason="late", tokens=9)) == (Reception.DUPLICATE, None, 2)
    assert issue(loaded).work == 4


def test_only_so_many_expired_attempts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gvm_stream.allocator.ledger.MOST_EXPIRED", 2)
    ledger = Ledger()
    items = [issue(ledger) for _ in range(3)]
    for item in items:
        ledger.settle(item.work, 0, Expired(reason="silent", tokens=5))
    late = [ledger.settle(item.work, 0, Cancelled(reason="late", tokens=8)).tokens for item in items]
    assert late == [0, 3, 3]
