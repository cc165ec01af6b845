from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gvm_stream.config import LearnerSection
from gvm_stream.errors import TrainingError
from gvm_stream.learner.batch import Row, pack, padding_share, plan_batch
from gvm_stream.wire.messages import TrainGroup, TrainRollout

RLOO = LearnerSection(advantage="rloo")


def int32(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def float32(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


def rollout(work: int, reward: float, length: int = 2, version: int = 0) -> TrainRollout:
    tokens, logprobs = int32(*range(10, 10 + length)), float32(*[-0.5] * length)
    spans = ((version, 0, length),) if length else ()
    return TrainRollout(work=work, reward=reward, tokens=tokens, logprobs=logprobs, spans=spans, truncated=False)


def group(number: int, *rollouts: TrainRollout, weight: float = 1.0) -> TrainGroup:
    return TrainGroup(
        group=number, prompt=f"train-{number}", prompt_tokens=int32(1, 2, 3), weight=weight, rollouts=rollouts
    )


def row(length: int, response: int = 1, work: int = 0) -> Row:
    logprobs = np.full(response, -0.5, np.float32)
    return Row(0, work, length - response, np.arange(1, length + 1, dtype=np.int32), logprobs, 1.0, 1.0)


def test_each_group_is_centred_by_itself_whatever_its_size() -> None:
    mixed = group(1, rollout(1, 1.0), rollout(2, 0.0), rollout(3, 0.0))
    plan = plan_batch([mixed, group(2, rollout(4, 1.0), rollout(5, 1.0))], RLOO, 1, 0)
    assert [(r.work, r.advantage) for r in plan.rows] == [(1, 1.0), (2, -0.5), (3, -0.5)]
    assert plan.fates == {"trained": (1, 2, 3), "zero_signal": (4, 5), "stale": ()}
    assert plan.zero_signal_groups == 1


def test_rollouts_without_signal_count_in_the_coefficients_of_the_others() -> None:
    groups = [group(1, rollout(1, 1.0), rollout(2, 0.0)), group(2, rollout(3, 1.0), rollout(4, 1.0))]
    assert [r.coefficient for r in plan_batch(groups, RLOO, 1, 0).rows] == [0.25, 0.25]
    raft = LearnerSection(advantage="raft")
    assert [(r.work, r.coefficient) for r in plan_batch(groups[:1], raft, 1, 0).rows] == [(1, 0.5)]


def test_weights_of_prompts_reach_the_coefficients() -> None:
    groups = [
        group(1, rollout(1, 1.0), rollout(2, 0.0), weight=3.0),
        group(2, *(rollout(w, w % 2, 1) for w in range(3, 7))),
    ]
    assert [r.coefficient for r in plan_batch(groups, RLOO, 1, 0).rows] == [3 / 8] * 2 + [1 / 16] * 4


def test_stale_rollouts_leave_the_group_before_its_advantages() -> None:
    old = rollout(3, 0.0, version=4)
    spanning = TrainRollout(
        work=4,
        reward=0.0,
        tokens=int32(1, 2),
        logprobs=float32(-1, -1),
        spans=((4, 0, 1), (7, 1, 2)),
        truncated=False,
    )
    fresh = (rollout(1, 1.0, version=7), rollout(2, 0.0, version=5))
    plan = plan_batch([group(1, *fresh, old, spanning)], RLOO, max_lag=2, version_now=7)
    assert plan.fates == {"trained": (1, 2), "zero_signal": (), "stale": (3, 4)}
    assert [r.advantage for r in plan.rows] == [1.0, -1.0]
    assert [r.coefficient for r in plan.rows] == [0.5, 0.5]
    assert plan.lags == (0, 2, 3, 3)


def test_an_empty_response_changes_nothing_for_the_others() -> None:
    seven = [rollout(w, w % 2) for w in range(7)]
    with_empty = plan_batch([group(1, *seven, rollout(7, 1.0, length=0))], RLOO, 1, 0)
    without = plan_batch([group(1, *seven)], RLOO, 1, 0)
    assert [(r.advantage, r.coefficient) for r in with_empty.rows] == [
        (r.advantage, r.coefficient) for r in without.rows
    ]
    assert with_empty.fates["zero_signal"] == (7,)


def test_rows_hold_the_sampled_tokens_after_the_prompt() -> None:
    (first, _) = plan_batch([group(1, rollout(1, 1.0), rollout(2, 0.0))], RLOO, 1, 0).rows
    assert first.tokens.tolist() == [1, 2, 3, 10, 11]
    assert first.prompt_length == 3
    assert first.logprobs.tolist() == [-0.5, -0.5]


def test_micro_batches_align_responses_and_pad_on_the_right() -> None:
    (batch,) = pack([row(3, response=1), row(6, response=4)], 100)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 0, 0, 0]]
    assert batch.mask.tolist() == [[True] * 4, [True, False, False, False]]
    assert batch.logprobs.tolist() == [[-0.5] * 4, [-0.5, 0, 0, 0]]
    assert batch.first == 1
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


def broken(
    tokens: bytes = int32(1, 2),
    logprobs: bytes = float32(-1, -1),
    spans: Sequence[tuple[int, int, int]] = ((0, 0, 2),),
    reward: float = 0.0,
) -> TrainRollout:
    return TrainRollout(work=8, reward=reward, tokens=tokens, logprobs=logprobs, spans=tuple(spans), truncated=False)


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (broken(logprobs=float32(-1)), "8 bytes of token ids and 4 bytes of log-probs"),
        (broken(tokens=b"123", logprobs=b"123"), "3 bytes of token ids"),
        (broken(logprobs=float32(-1, math.nan)), "of token 1 is nan"),
        (broken(logprobs=float32(-math.inf, -1)), "of token 0 is -inf"),
        (broken(reward=math.nan), "reward is nan"),
        (broken(spans=((0, 0, 1),)), "do not cover its 2 tokens"),
        (broken(spans=((0, 0, 1), (1, 0, 2))), "do not cover"),
        (broken(spans=((0, 0, 0), (1, 0, 2))), "do not cover"),
        (broken(spans=()), "do not cover"),
    ],
)
def test_a_rollout_that_breaks_the_protocol_is_named(bad: TrainRollout, complaint: str) -> None:
    with pytest.raises(TrainingError, match=f"group 5, work 8.*{complaint}"):
        plan_batch([group(5, rollout(1, 1.0), bad)], RLOO, 1, 0)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_that_is_no_weight_is_refused(weight: float) -> None:
    with pytest.raises(TrainingError, match="group 5 has weight"):
        plan_batch([group(5, rollout(1, 1.0), weight=weight)], RLOO, 1, 0)


def test_a_group_without_a_prompt_is_refused() -> None:
    bare = TrainGroup(group=5, prompt="p", prompt_tokens=b"", weight=1.0, rollouts=())
    with pytest.raises(TrainingError, match=r"group 5 \(p\) has 0 bytes of prompt tokens"):
        plan_batch([bare], RLOO, 1, 0)
