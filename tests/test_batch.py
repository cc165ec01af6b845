from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.allocator.arrays import Floats
from gvm_stream.errors import TrainingError
from gvm_stream.learner.advantages import Allocated, Group, Opob, Raft, Rloo, Shrunken
from gvm_stream.learner.batch import PASS, Row, pack, padding_share, plan_batch
from gvm_stream.learner.losses import Gvpo, PolicyGradient
from gvm_stream.learner.objective import Objective
from gvm_stream.wire.messages import TrainGroup, TrainRollout

RLOO = Objective(Rloo(), PolicyGradient(), "seq_sum", delta_l_power=1.0, max_tokens=100)


def int32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def float32(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def rollout(work: int, reward: float, length: int = 2, lag: int = 0, coefficient: float = 0.0) -> TrainRollout:
    return TrainRollout(
        work=work,
        reward=reward,
        tokens=int32(*range(10, 10 + length)),
        logprobs=float32(*[-0.5] * length),
        spans=((0, 0, length),) if length else (),
        truncated=False,
        lag=lag,
        coefficient=coefficient,
    )


def group(
    number: int, *rollouts: TrainRollout, weight: float = 1.0, prior: tuple[float, float] = (0.5, 0.5)
) -> TrainGroup:
    return TrainGroup(
        group=number,
        prompt=f"train-{number}",
        prompt_tokens=int32(1, 2, 3),
        weight=weight,
        prior=prior,
        rollouts=rollouts,
    )


def row(length: int, response: int = 1, work: int = 0) -> Row:
    logprobs = np.full(response, -0.5, np.float32)
    return Row(0, work, length - response, np.arange(1, length + 1, dtype=np.int32), logprobs, 1.0, 1.0)


def test_each_group_is_centred_by_itself_whatever_its_size() -> None:
    mixed = group(1, rollout(1, 1.0), rollout(2, 0.0), rollout(3, 0.0))
    plan = plan_batch([mixed, group(2, rollout(4, 1.0), rollout(5, 1.0))], RLOO, 1)
    assert [(r.work, r.advantage) for r in plan.rows] == [(1, 1.0), (2, -0.5), (3, -0.5)]
    assert plan.fates == {"trained": (1, 2, 3), "zero_signal": (4, 5), "stale": ()}
    assert plan.zero_signal_groups == 1


def test_rollouts_without_signal_count_in_the_coefficients_of_the_others() -> None:
    groups = [group(1, rollout(1, 1.0), rollout(2, 0.0)), group(2, rollout(3, 1.0), rollout(4, 1.0))]
    assert [r.coefficient for r in plan_batch(groups, RLOO, 1).rows] == [0.25, 0.25]
    raft = replace(RLOO, advantage=Raft())
    assert [(r.work, r.coefficient) for r in plan_batch(groups[:1], raft, 1).rows] == [(1, 0.5)]


def test_weights_of_prompts_reach_the_coefficients() -> None:
    groups = [
        group(1, rollout(1, 1.0), rollout(2, 0.0), weight=3.0),
        group(2, *(rollout(w, w % 2, 1) for w in range(3, 7))),
    ]
    assert [r.coefficient for r in plan_batch(groups, RLOO, 1).rows] == [3 / 8] * 2 + [1 / 16] * 4


def test_rollouts_that_the_allocator_left_out_are_not_trained_on() -> None:
    members = [rollout(1, 1.0, coefficient=0.5), rollout(2, 1.0), rollout(3, 0.0, coefficient=-0.5), rollout(4, 0.0)]
    plan = plan_batch([group(1, *members)], replace(RLOO, advantage=Allocated()), 1)
    assert [(r.work, r.advantage * r.coefficient) for r in plan.rows] == [(1, 0.5), (3, -0.5)]
    assert plan.fates == {"trained": (1, 3), "zero_signal": (2, 4), "stale": ()}


def test_what_a_rollout_was_allocated_stays_its_advantage_when_others_are_too_old() -> None:
    members = [
        rollout(1, 1.0, coefficient=1 / 3),
        rollout(2, 0.0, coefficient=-1 / 6),
        rollout(3, 0.0, lag=3, coefficient=-1 / 6),
    ]
    plan = plan_batch([group(1, *members)], replace(RLOO, advantage=Allocated()), max_lag=2)
    assert [r.advantage for r in plan.rows] == [1.0, -0.5]
    assert [r.coefficient for r in plan.rows] == [0.5, 0.5]


def test_the_prior_of_a_group_reaches_its_baseline() -> None:
    plan = plan_batch([group(1, rollout(1, 1.0), prior=(1, 3))], replace(RLOO, advantage=Shrunken()), 1)
    assert [r.advantage for r in plan.rows] == [0.75]


def test_a_loss_may_want_rollouts_without_advantage_if_others_have_one() -> None:
    gvpo = replace(RLOO, loss=Gvpo())
    silent = group(2, rollout(3, 1.0), rollout(4, 1.0))
    plan = plan_batch([group(1, rollout(1, 1.0), rollout(2, 0.0)), silent], gvpo, 1)
    assert [(r.work, r.advantage) for r in plan.rows] == [(1, 1.0), (2, -1.0), (3, 0.0), (4, 0.0)]
    assert (plan.fates["trained"], plan.zero_signal_groups) == ((1, 2, 3, 4), 1)
    assert plan_batch([silent], gvpo, 1).rows == ()


def test_advantages_that_are_measured_get_whole_groups_but_those_without_signal() -> None:
    """The second rollout has the mean of the others, until measured."""
    members = [rollout(1, 1.0), rollout(2, 0.5), rollout(3, 0.0), rollout(4, 0.0, lag=9)]
    plan = plan_batch([group(1, *members), group(2, rollout(5, 1.0))], replace(RLOO, advantage=Opob()), 1)
    assert plan.fates == {"trained": (1, 2, 3), "zero_signal": (5,), "stale": (4,)}
    assert [(g, c.works, c.group.rewards.tolist()) for g, c in plan.compared.items()] == [(1, (1, 2, 3), [1, 0.5, 0])]


class OfTheFirst(Rloo, frozen=True):
    def of_group(self, group: Group) -> Floats:
        return super().of_group(group)[:1]


def test_an_advantage_of_your_own_is_one_number_for_each_rollout() -> None:
    own = replace(RLOO, advantage=OfTheFirst())
    with pytest.raises(TrainingError, match=r"\(OfTheFirst\) gave an array of shape \[1\] for a group of 2 rollouts, "):
        plan_batch([group(1, rollout(1, 1.0), rollout(2, 0.0))], own, max_lag=1)


def test_stale_rollouts_leave_the_group_before_its_advantages() -> None:
    fresh = (rollout(1, 1.0), rollout(2, 0.0, lag=2))
    old = (rollout(3, 0.0, lag=3), rollout(4, 0.0, lag=3))
    plan = plan_batch([group(1, *fresh, *old)], RLOO, max_lag=2)
    assert plan.fates == {"trained": (1, 2), "zero_signal": (), "stale": (3, 4)}
    assert [r.advantage for r in plan.rows] == [1.0, -1.0]
    assert [r.coefficient for r in plan.rows] == [0.5, 0.5]
    assert plan.lags == (0, 2, 3, 3)


def test_an_empty_response_changes_nothing_for_the_others() -> None:
    seven = [rollout(w, w % 2) for w in range(7)]
    with_empty = plan_batch([group(1, *seven, rollout(7, 1.0, length=0))], RLOO, 1)
    without = plan_batch([group(1, *seven)], RLOO, 1)
    assert [(r.advantage, r.coefficient) for r in with_empty.rows] == [
        (r.advantage, r.coefficient) for r in without.rows
    ]
    assert with_empty.fates["zero_signal"] == (7,)


def test_rows_hold_the_sampled_tokens_after_the_prompt() -> None:
    (first, _) = plan_batch([group(1, rollout(1, 1.0), rollout(2, 0.0))], RLOO, 1).rows
    assert first.tokens.tolist() == [1, 2, 3, 10, 11]
    assert first.prompt_length == 3
    assert first.logprobs.tolist() == [-0.5, -0.5]


def test_micro_batches_align_responses_and_pad_on_the_right() -> None:
    (batch,) = pack([row(3, response=1), row(6, response=4)], 100)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 0, 0, 0]]
    assert batch.mask.tolist() == [[True] * 4, [True, False, False, False]]
    assert batch.logprobs.tolist() == [[-0.5] * 4, [-0.5, 0, 0, 0]]
    assert [index.tolist() for index in batch.index] == [[0, 0, 0, 0, 1], [0, 1, 2, 3, 0], [2, 3, 4, 5, 2]]


@given(st.lists(st.integers(2, 60), min_size=1, max_size=40), st.integers(1, 200))
def test_packing_keeps_every_row_and_the_token_limit(lengths: list[int], limit: int) -> None:
    rows = [row(length, work=work) for length, work in zip(lengths, count(), strict=False)]
    batches = pack(rows, limit)
    assert sorted(int((tokens != 0).sum()) for b in batches for tokens in b.tokens) == sorted(lengths)
    assert all(b.tokens.numel() <= limit or len(b.tokens) == 1 for b in batches)
    total = sum(b.tokens.numel() for b in batches)
    assert padding_share(rows, batches) == pytest.approx((total - sum(lengths)) / total)


def test_rows_of_like_length_share_a_micro_batch() -> None:
    rows = [row(n) for n in (2, 100, 2, 100)]
    batches = pack(rows, 200)
    assert [tuple(b.tokens.shape) for b in batches] == [(2, 100), (2, 2)]
    assert padding_share(rows, batches) == 0


def test_a_little_padding_is_better_than_another_pass() -> None:
    few, many = ([row(20)] * n + [row(10)] * n for n in (PASS // 10, PASS // 10 + 1))
    assert [tuple(b.tokens.shape) for b in pack(few, 10_000)] == [(24, 20)]
    assert [tuple(b.tokens.shape) for b in pack(many, 10_000)] == [(13, 20), (13, 10)]


@given(st.lists(st.integers(2, 200), min_size=1, max_size=8), st.integers(100, 1000))
def test_no_other_split_takes_less_time(lengths: list[int], limit: int) -> None:
    found = [b.tokens.shape for b in pack([row(length) for length in lengths], limit)]
    descending = sorted(lengths, reverse=True)
    costs = []
    for cuts in product([False, True], repeat=len(lengths) - 1):
        bounds = [0, *(i for i, cut in enumerate(cuts, start=1) if cut), len(lengths)]
        shapes = [(stop - first, descending[first]) for first, stop in pairwise(bounds)]
        if all(n == 1 or n * longest <= limit for n, longest in shapes):
            costs.append(sum(n * longest + PASS for n, longest in shapes))
    assert sum(n * longest + PASS for n, longest in found) == min(costs)


def test_responses_as_in_the_arithmetic_task_waste_a_tenth_at_most() -> None:
    """A step of 32 prompts with 8 rollouts, whose lengths go with the number of operations of the prompt."""
    random = np.random.default_rng(0)
    steps = random.choice(np.arange(1, 7), 32, p=1 / np.arange(1, 7) / np.sum(1 / np.arange(1, 7)))
    lengths = (4 + 2 * steps.repeat(8)) + np.minimum(80, 4 + 8 * steps.repeat(8) + random.integers(-3, 4, 256))
    rows = [row(int(length)) for length in lengths]
    assert padding_share(rows, pack(rows, 4096)) < 0.1


def broken(
    tokens: bytes = int32(1, 2),
    logprobs: bytes = float32(-1, -1),
    spans: Sequence[tuple[int, int, int]] = ((0, 0, 2),),
    reward: float = 0.0,
    coefficient: float = 0.0,
) -> TrainRollout:
    return TrainRollout(
        work=8,
        reward=reward,
        tokens=tokens,
        logprobs=logprobs,
        spans=tuple(spans),
        truncated=False,
        lag=0,
        coefficient=coefficient,
    )


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (broken(logprobs=float32(-1)), "8 bytes of token ids and 4 bytes of log-probs"),
        (broken(tokens=b"123", logprobs=b"123"), "3 bytes of token ids"),
        (broken(logprobs=float32(-1, math.nan)), "of token 1 is nan"),
        (broken(logprobs=float32(-math.inf, -1)), "of token 0 is -inf"),
        (broken(reward=math.nan), "reward is nan"),
        (broken(coefficient=math.inf), "coefficient is inf"),
        (broken(spans=((0, 0, 1),)), "do not cover its 2 tokens"),
        (broken(spans=((0, 0, 1), (1, 0, 2))), "do not cover"),
        (broken(spans=((0, 0, 0), (1, 0, 2))), "do not cover"),
        (broken(spans=()), "do not cover"),
    ],
)
def test_a_rollout_that_breaks_the_protocol_is_named(bad: TrainRollout, complaint: str) -> None:
    with pytest.raises(TrainingError, match=f"group 5, work 8.*{complaint}"):
        plan_batch([group(5, rollout(1, 1.0), bad)], RLOO, 1)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_that_is_no_weight_is_refused(weight: float) -> None:
    with pytest.raises(TrainingError, match="group 5 has weight"):
        plan_batch([group(5, rollout(1, 1.0), weight=weight)], RLOO, 1)


@pytest.mark.parametrize("prior", [(0.0, 1.0), (1.0, math.nan), (math.inf, 1.0)])
def test_a_prior_that_is_no_distribution_is_refused(prior: tuple[float, float]) -> None:
    with pytest.raises(TrainingError, match=r"group 5 has prior .* two finite numbers above 0"):
        plan_batch([group(5, rollout(1, 1.0), prior=prior)], RLOO, 1)


def test_a_group_without_a_prompt_is_refused() -> None:
    bare = TrainGroup(group=5, prompt="p", prompt_tokens=b"", weight=1.0, prior=(1, 1), rollouts=())
    with pytest.raises(TrainingError, match=r"group 5 \(p\) has 0 bytes of prompt tokens"):
        plan_batch([bare], RLOO, 1)
