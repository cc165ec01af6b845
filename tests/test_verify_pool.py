from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec
import pytest

from gvm_stream.config import VerifierSection
from gvm_stream.verify.pool import CHUNK, CRASHED, TIMEOUT, VerifierPool
from gvm_stream.verify.verdict import Verdict, VerdictScored, VerdictUnscorable, VerifyItem

FAULTS = VerifierSection(kind="python", function="tests.verifier_faults:misbehave", timeout_s=60.0)
EXACT = VerifierSection(kind="exact", answer_marker="####", workers=2)

Backend = Literal["asyncio", "trio"]
both = pytest.mark.parametrize("backend", ["asyncio", "trio"])


def ask(response: str, answer: str = "any") -> VerifyItem:
    return VerifyItem(answer=answer, response=response)


def rewards(verdicts: list[Verdict]) -> list[float]:
    assert all(isinstance(verdict, VerdictScored) for verdict in verdicts), verdicts
    return [verdict.reward for verdict in verdicts if isinstance(verdict, VerdictScored)]


def with_limit(seconds: float, *, workers: int = 1) -> VerifierSection:
    return msgspec.structs.replace(FAULTS, timeout_s=seconds, workers=workers)


async def start_hanging(pool: VerifierPool, tasks: anyio.abc.TaskGroup, items: int = 1) -> None:
    """Returns when a worker is at it."""
    tasks.start_soon(pool.verify, [ask("hang")] * items)
    while not pool.stats.running:
        await anyio.lowlevel.checkpoint()


def descendants(process: int) -> set[int]:
    """Processes below this one, dead ones that nobody has waited for included."""
    found: set[int] = set()
    waiting = [process]
    while waiting:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended while it was looked at
            for task in Path(f"/proc/{waiting.pop()}/task").glob("*/children"):
                below = [int(child) for child in task.read_text().split()]
                found.update(below)
                waiting.extend(below)
    return found


@both
def test_verdicts_come_in_the_order_of_the_items_whatever_the_chunks(backend: Backend) -> None:
    items = [VerifyItem(answer="1", response=f"#### {n % 3}") for n in range(3 * CHUNK + 5)]

    async def main() -> None:
        async with VerifierPool(EXACT) as pool:
            assert rewards(await pool.verify(items)) == [float(n % 3 == 1) for n in range(len(items))]
            assert await pool.verify([]) == []
            assert (pool.stats.waiting, pool.stats.running, pool.stats.killed) == (0, 0, 0)
            assert len(pool.stats.seconds) == len(items)

    anyio.run(main, backend=backend)


@both
def test_calls_at_the_same_time_get_their_own_verdicts(backend: Backend) -> None:
    async def main() -> None:
        async with VerifierPool(msgspec.structs.replace(FAULTS, workers=2)) as pool:

            async def call(number: int) -> None:
                items = [ask(str(1000 * number + n)) for n in range(50)]
                assert rewards(await pool.verify(items)) == [1000 * number + n for n in range(50)]

            async with anyio.create_task_group() as tasks:
                for number in range(8):
                    tasks.start_soon(call, number)

    anyio.run(main, backend=backend)


@both
def test_a_computation_without_end_costs_only_its_own_verdict(backend: Backend) -> None:
    async def main() -> None:
        async with VerifierPool(with_limit(1.0)) as pool:
            verdicts = await pool.verify([ask("1"), ask("hang"), ask("2")])
            assert verdicts[1] == TIMEOUT
            assert rewards(verdicts[::2]) == [1, 2]
            assert rewards(await pool.verify([ask("3")])) == [3]

    anyio.run(main, backend=backend)


@both
def test_others_are_judged_while_a_computation_without_end_runs(backend: Backend) -> None:
    async def main() -> None:
        async with VerifierPool(with_limit(1e6)) as pool, anyio.create_task_group() as tasks:
            await start_hanging(pool, tasks)
            assert rewards(await pool.verify([ask(str(n)) for n in range(40)])) == list(range(40))
            assert pool.stats.running == 1
            tasks.cancel_scope.cancel()

    anyio.run(main, backend=backend)


def test_endless_computations_have_at_most_as_many_processes_again_as_there_are_workers() -> None:
    async def main() -> None:
        async with VerifierPool(with_limit(1.0, workers=2)) as pool:
            assert await pool.verify([ask("hang")] * 6) == [TIMEOUT] * 6
            assert pool.stats.killed == 6

    before = len(descendants(os.getpid()))
    most = 0

    async def watch() -> None:
        nonlocal most
        async with anyio.create_task_group() as tasks:

            async def look() -> None:
                nonlocal most
                while True:
                    most = max(most, len(descendants(os.getpid())) - before)
                    await anyio.sleep(0.05)

            tasks.start_soon(look)
            await main()
            tasks.cancel_scope.cancel()

    anyio.run(watch)
    assert most <= 1 + 2 * 4  # the template, and for each process that runs the one that it replaces, not reaped yet


@both
def test_a_worker_that_dies_costs_only_the_item_it_dies_of(backend: Backend) -> None:
    async def main() -> None:
        async with VerifierPool(FAULTS) as pool:
            verdicts = await pool.verify([ask("1"), ask("die"), ask("exit"), ask("2")])
            assert verdicts[1:3] == [CRASHED, CRASHED]
            assert rewards(verdicts[::3]) == [1, 2]
            assert pool.stats.killed == 4  # each is tried twice

    anyio.run(main, backend=backend)


def test_a_worker_killed_once_by_someone_else_costs_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with VerifierPool(FAULTS) as pool:
            items = [ask("0"), ask("die once", str(tmp_path / "a")), ask("die once", str(tmp_path / "b"))]
            assert rewards(await pool.verify(items)) == [0, 1, 1]

    anyio.run(main)


@both
def test_processes_killed_between_calls_are_replaced(backend: Backend) -> None:
    async def main() -> None:
        before = descendants(os.getpid())
        async with VerifierPool(msgspec.structs.replace(FAULTS, workers=2)) as pool:
            for process in descendants(os.getpid()) - before:
                os.kill(process, signal.SIGKILL)
            assert rewards(await pool.verify([ask(str(n)) for n in range(20)])) == list(range(20))

    anyio.run(main, backend=backend)


@both
def test_a_cancelled_verification_stops_at_once_and_ends_what_runs(backend: Backend, tmp_path: Path) -> None:
    async def main() -> None:
        async with VerifierPool(with_limit(1e6)) as pool:
            (first,) = rewards(await pool.verify([ask("process id")]))
            with anyio.move_on_after(0.3) as scope:
                await pool.verify([ask("sleep then touch", str(tmp_path / "touched")), *[ask("hang")] * 40])
            assert scope.cancelled_caught
            assert (pool.stats.waiting, pool.stats.running) == (0, 0)
            (second,) = rewards(await pool.verify([ask("process id")]))
            assert second != first
            assert rewards(await pool.verify([ask("4")] * 3)) == [4, 4, 4]

    anyio.run(main, backend=backend)
    assert not (tmp_path / "touched").exists()


@both
def test_no_process_is_left_after_the_pool_even_if_it_ends_in_the_middle_of_an_item(backend: Backend) -> None:
    async def main() -> None:
        async with VerifierPool(with_limit(1e6, workers=2)) as pool, anyio.create_task_group() as tasks:
            await start_hanging(pool, tasks, 10)
            await pool.verify([ask("1")])
            tasks.cancel_scope.cancel()

    before = descendants(os.getpid())
    anyio.run(main, backend=backend)
    assert descendants(os.getpid()) == before


def test_memory_of_a_worker_is_bounded() -> None:
    async def main() -> None:
        async with VerifierPool(msgspec.structs.replace(FAULTS, memory_mib=512)) as pool:
            small, large = await pool.verify([ask("allocate", "16"), ask("allocate", "512")])
            assert rewards([small]) == [16 << 20]
            assert isinstance(large, VerdictUnscorable)
            assert "MemoryError" in large.reason

    anyio.run(main)


def test_a_worker_is_replaced_after_so_many_verdicts_and_none_is_lost() -> None:
    async def main() -> None:
        async with VerifierPool(msgspec.structs.replace(FAULTS, recycle_after=3)) as pool:
            processes = rewards(await pool.verify([ask("process id")] * 10))
            assert [processes.count(process) for process in dict.fromkeys(processes)] == [3, 3, 3, 1]
            assert (pool.stats.recycled, pool.stats.killed) == (3, 0)

    anyio.run(main)


def test_a_row_may_name_a_verifier_that_the_pool_was_not_started_for() -> None:
    async def main() -> None:
        async with VerifierPool(EXACT) as pool:
            rows = [
                VerifyItem(answer="4", response="#### 4"),
                VerifyItem(answer="4", response="#### 4.0", kind="numeric"),
                VerifyItem(answer="\\frac{1}{2}", response="#### 0.5", kind="math"),
            ]
            assert rewards(await pool.verify(rows)) == [1, 1, 1]

    anyio.run(main)


def test_workers_end_with_their_parent_in_the_middle_of_an_item() -> None:
    script = """if True:
        import os, anyio
        from tests.test_verify_pool import VerifierPool, ask, descendants, start_hanging, with_limit
        async def main():
            async with VerifierPool(with_limit(1e6)) as pool, anyio.create_task_group() as tasks:
                await start_hanging(pool, tasks)
                await pool.verify([ask("1")])
                print(*descendants(os.getpid()), flush=True)
                await anyio.sleep_forever()
        anyio.run(main)
        """
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    processes = [os.pidfd_open(int(process)) for process in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert len(processes) == 3  # the template, the process that hangs, the one that took its place
    for process in processes:
        assert select.select([process], [], [], 10)[0]
        os.close(process)
