from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gvm_stream.config import VerifierSection
from gvm_stream.verify.blocking import BlockingVerifier
from gvm_stream.verify.verdict import VerdictScored, VerifyItem
from tests.test_verify_pool import FAULTS, ask, descendants, rewards

MATH = VerifierSection(kind="math")
FIVE = VerifyItem(answer="5", response="\\boxed{5}")


@pytest.fixture(scope="module")
def verifier() -> Iterator[BlockingVerifier]:
    with BlockingVerifier(MATH) as verifier:
        yield verifier


def right(verifier: BlockingVerifier) -> bool:
    (verdict,) = verifier.verify([FIVE])
    return isinstance(verdict, VerdictScored) and verdict.reward == 1


def right_in_a_process_of_its_own() -> bool:
    with BlockingVerifier(MATH) as verifier:
        return right(verifier)


def test_the_main_thread_may_ask(verifier: BlockingVerifier) -> None:
    assert right(verifier)


def test_several_threads_may_ask_at_once(verifier: BlockingVerifier) -> None:
    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(right, [verifier] * 24))


def test_asyncio_code_may_ask_through_a_thread(verifier: BlockingVerifier) -> None:
    async def main() -> bool:
        return await asyncio.to_thread(right, verifier)

    assert asyncio.run(main())


def test_a_verifier_may_be_made_in_a_thread_and_in_a_child_process() -> None:
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(right_in_a_process_of_its_own).result()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        assert process.submit(right_in_a_process_of_its_own).result()


def test_every_item_gets_its_own_verdict_whatever_else_fails() -> None:
    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.integers(0, 9) | st.just("exit"), max_size=70))
    def check(asked: list[int | str]) -> None:
        verdicts = faults.verify([ask(str(each)) for each in asked])
        assert [v.reward if isinstance(v, VerdictScored) else "exit" for v in verdicts] == asked

    with BlockingVerifier(FAULTS) as faults:
        check()


def test_no_process_or_thread_is_left_behind() -> None:
    before = descendants(os.getpid())
    with BlockingVerifier(FAULTS) as verifier:
        assert rewards(verifier.verify([ask("1")])) == [1]
        assert descendants(os.getpid()) > before
    assert descendants(os.getpid()) == before
